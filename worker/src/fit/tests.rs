use tutti_settings::DeviceChoice;

use super::*;
use crate::device::tests::settings;

#[test]
fn a_model_that_is_too_large_is_loaded_only_if_the_check_is_off() {
    let mut settings = settings(DeviceChoice::Cpu);
    let refusal = Error::invalid("model", "the weights take 61.0 GiB");
    assert_eq!(MemoryCheck::of([&settings]).refuse(refusal.clone()), Err(refusal.clone()));
    settings.weights.no_memory_check = true;
    assert_eq!(MemoryCheck::of([&settings]).refuse(refusal), Ok(()));
}
