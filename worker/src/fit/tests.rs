use tutti_settings::DeviceChoice;

use super::*;
use crate::device::tests::settings;

#[test]
fn a_model_that_is_too_large_is_loaded_only_if_the_check_is_off() {
    let mut settings = settings(DeviceChoice::Cpu);
    let (refusal, checked) = (Error::invalid("model", "the weights take 61.0 GiB"), settings.clone());
    assert_eq!(MemoryCheck::of([&settings]).apply(refusal.clone()), Err(refusal.clone()));
    settings.weights.no_memory_check = true;
    assert_eq!(MemoryCheck::of([&settings]).apply(refusal.clone()), Ok(()));
    // One group without the check must not take the memory of another group.
    assert_eq!(MemoryCheck::of([&settings, &checked]).apply(refusal.clone()), Err(refusal));
}

#[test]
fn activations_in_f32_are_for_weights_of_four_bits() {
    let mut settings = settings(DeviceChoice::Cpu);
    let ranks = |has_int4| [Footprint { has_int4, ..Footprint::default() }];
    assert_eq!(check_activations(&settings, &ranks(false)), Ok(()));
    settings.weights.no_quantized_activations = true;
    let error = check_activations(&settings, &ranks(false)).unwrap_err();
    assert_eq!(error.field(), Some("no_quantized_activations"));
    assert_eq!(check_activations(&settings, &ranks(true)), Ok(()));
    settings.weights.quantize = Quantize::Int4;
    assert_eq!(check_activations(&settings, &ranks(false)), Ok(()));
}
