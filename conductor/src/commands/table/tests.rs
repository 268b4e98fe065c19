use super::*;

#[test]
fn columns_are_as_wide_as_their_widest_cell() {
    let rows = [["0".into(), "prefill-é".into()], ["12".into(), "x".into()]];
    let text = table(["ID", "GROUP"], [true, false], &rows);
    assert_eq!(text, "ID  GROUP\n 0  prefill-é\n12  x\n");
}

#[test]
fn durations_have_few_digits() {
    assert_eq!(
        [0, 1_500, 999_949, 1_000_000, 12_345_678, 3_723_000_000].map(duration),
        ["0.0 ms", "1.5 ms", "999.9 ms", "1.00 s", "12.35 s", "1h 02m 03s"]
    );
}
