use super::*;

#[test]
fn a_setting_has_the_name_of_its_path() {
    for setting in CpuIsa::ALL.iter().filter(|setting| **setting != CpuIsa::Auto) {
        let isa = resolve_among(*setting, &Isa::ALL).unwrap();
        assert_eq!(serde_json::to_value(setting).unwrap(), isa.to_string());
        assert_eq!(setting.name(), isa.to_string());
    }
}

#[test]
fn auto_is_the_best_path_of_the_machine() {
    assert_eq!(resolve(CpuIsa::Auto).unwrap(), Isa::detect());
    assert_eq!(resolve_among(CpuIsa::Auto, &Isa::ALL[..2]).unwrap(), Isa::Avx2);
}

#[test]
fn a_path_that_the_machine_lacks_is_refused_with_a_list_of_its_paths() {
    let error = resolve_among(CpuIsa::Avx512Bf16, &Isa::ALL[..4]).unwrap_err();
    assert_eq!(error.field(), Some("cpu_isa"));
    let expected = "this machine has no avx512-bf16 instructions; it has portable, avx2, avx512, avx512-vnni";
    assert_eq!(error.message(), expected);
}
