use super::*;

fn read(variables: &[(&str, &str)]) -> Result<Settings, String> {
    Settings::read(|name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned()))
}

#[test]
fn nothing_set_is_one_plain_device() {
    let settings = read(&[]).unwrap();
    assert_eq!((settings.devices, settings.seed, settings.capability), (vec![0], None, (9, 0)));
    assert!(!settings.races && !settings.uninitialised);
}

#[test]
fn visible_devices_end_at_the_first_that_does_not_exist() {
    let devices = |list| read(&[("EMULATED_GPUS", "4"), ("CUDA_VISIBLE_DEVICES", list)]).unwrap().devices;
    assert_eq!(devices("2,1"), [2, 1]);
    assert_eq!(devices("3,9,1"), [3]);
    assert_eq!(devices("-1"), [0; 0]);
    assert_eq!(devices(""), [0, 1, 2, 3], "an empty value counts as none");
}

#[test]
fn sizes_have_units() {
    let memory = |text| read(&[("EMULATED_GPU_MEMORY", text)]).map(|s| s.memory_bytes);
    assert_eq!(memory("4096"), Ok(4096));
    assert_eq!(memory("3MiB"), Ok(3 << 20));
    assert_eq!(memory("2 GiB"), Ok(2 << 30));
    assert!(memory("2GB").unwrap_err().contains("2GB"));
}

#[test]
fn wrong_values_are_named() {
    for (name, value) in [
        ("EMULATED_GPUS", "two"),
        ("EMULATED_GPU_SEED", "-1"),
        ("EMULATED_GPU_CHECKS", "racing"),
        ("EMULATED_GPU_CAPABILITY", "90"),
        ("EMULATED_GPU_FAULTS", "fall"),
    ] {
        let error = read(&[(name, value)]).unwrap_err();
        assert!(error.contains(name) && error.contains(value), "{error}");
    }
}
