use super::Needs;

#[test]
fn a_device_lacks_the_families_that_are_needed_and_not_implemented() {
    let needs = |experts, delta_rule| Needs { experts, delta_rule, ..Needs::default() };
    for (needed, implemented, lacking) in [
        (needs(false, false), needs(false, false), &[][..]),
        (needs(true, true), needs(true, true), &[]),
        (needs(true, false), needs(false, true), &["Experts"]),
        (needs(true, true), needs(true, false), &["DeltaRule"]),
        (needs(true, true), needs(false, false), &["Experts", "DeltaRule"]),
    ] {
        assert_eq!(needed.beyond(implemented), lacking);
    }
}
