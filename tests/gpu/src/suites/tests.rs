use super::results;

#[test]
fn tests_are_read_with_and_without_their_output() {
    let text = "running 4 tests\ntest a::b ... ok\ntest c ... some words\nmore words\nok\ntest d ... FAILED\n\
                test e ... half a line, and a crash\n";
    assert_eq!(results(text), [("a::b", true), ("c", true), ("d", false)]);
}
