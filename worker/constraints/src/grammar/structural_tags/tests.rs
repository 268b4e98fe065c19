use super::*;

#[test]
fn texts_are_divided_at_the_longest_special_tokens() {
    let special = [("<tool_call>".to_owned(), 7), ("<tool".to_owned(), 3)];
    let found = pieces("a<tool_call><toolbox", &special);
    assert_eq!(found, [Piece::Text("a"), Piece::Special(7), Piece::Special(3), Piece::Text("box")]);
    assert_eq!(pieces("", &special), []);
}

#[test]
fn a_tag_belongs_to_its_shortest_trigger() {
    let tag = StructuralTag { begin: "<f=x>".into(), schema: true.into(), end: String::new() };
    let triggers = ["<".to_owned(), "<f=".to_owned(), "other".to_owned()];
    assert_eq!(trigger_of(&tag, &triggers), Some(0));
    assert_eq!(trigger_of(&tag, &triggers[1..]), Some(0));
    assert_eq!(trigger_of(&tag, &triggers[2..]), None);
}
