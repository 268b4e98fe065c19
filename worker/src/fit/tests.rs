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
