use super::*;

fn think() -> Reasoning {
    Reasoning::choose("think", None).unwrap().unwrap()
}

#[test]
fn the_end_of_a_prompt_says_whether_a_block_is_open() {
    assert_eq!(think().block_after("…assistant\n<think>\n"), Block::Open);
    assert_eq!(think().block_after("…assistant\n<think>\n\n</think>\n\n"), Block::Closed);
    assert_eq!(think().block_after("What is <think>?\nassistant\n"), Block::Unopened);
    assert_eq!(think().block_after(""), Block::Unopened);
}

#[test]
fn a_message_that_is_continued_says_whether_a_block_is_open() {
    assert_eq!(think().block_within("<think>Let me"), Block::Open);
    assert_eq!(think().block_within("<think>Let me</think>So"), Block::Closed);
    assert_eq!(think().block_within("So"), Block::Closed);
    assert_eq!(think().block_within(""), Block::Unopened);
}

#[test]
fn the_kind_is_that_of_the_template() {
    let name = |template| Reasoning::choose("auto", Some(template)).unwrap().map(|kind| kind.name);
    assert_eq!(name("{{ content.split('</think>') }}"), Some("think"));
    assert_eq!(name("[THINK]{{ thought }}[/THINK]"), Some("mistral"));
    assert_eq!(name("{{ content }}"), None);
    assert_eq!(Reasoning::choose("none", Some("</think>")), Ok(None));
    let refusal = Reasoning::choose("deep", None).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "no kind of reasoning is named \"deep\"; there are auto, none, think, mistral"
    );
}
