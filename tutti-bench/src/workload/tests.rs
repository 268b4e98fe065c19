use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;

use super::*;

fn synthetic() -> Synthetic {
    Synthetic {
        input_tokens: "1:9".parse().unwrap(),
        output_tokens: "5".parse().unwrap(),
        shared_prefix: 0,
        prefixes: 1,
        alphabet: Alphabet::TokenIds,
        vocab_size: 7,
        seed: 1,
        extra: Map::new(),
        next: 0,
    }
}

fn prompts(mut synthetic: Synthetic, count: usize) -> Vec<Vec<u32>> {
    let prompt = |request: Request| match request.content {
        Content::TokenIds(ids) => ids,
        other => panic!("{other:?}"),
    };
    (0..count).map(|_| prompt(synthetic.request())).collect()
}

#[test]
fn the_seed_decides_every_request() {
    let requests = |mut synthetic: Synthetic| (0..100).map(|_| synthetic.request()).collect::<Vec<_>>();
    assert_eq!(requests(synthetic()), requests(synthetic()));
    assert_ne!(requests(synthetic()), requests(Synthetic { seed: 2, ..synthetic() }));
    let distinct: BTreeSet<_> =
        prompts(Synthetic { input_tokens: "30".parse().unwrap(), ..synthetic() }, 100).into_iter().collect();
    assert_eq!(distinct.len(), 100);
}

#[test]
fn prompts_keep_to_their_lengths_and_vocabulary_and_use_them_whole() {
    let prompts = prompts(synthetic(), 2_000);
    assert_eq!(prompts.iter().map(Vec::len).collect::<BTreeSet<_>>(), (1..=9).collect());
    assert_eq!(prompts.into_iter().flatten().collect::<BTreeSet<_>>(), (0..7).collect());
}

#[test]
fn prompts_share_as_many_prefixes_as_asked_for() {
    let shared = Synthetic {
        input_tokens: "40".parse().unwrap(),
        shared_prefix: 30,
        prefixes: 3,
        vocab_size: 1000,
        ..synthetic()
    };
    let mut counts: BTreeMap<Vec<u32>, usize> = BTreeMap::new();
    let mut ends = BTreeSet::new();
    for prompt in prompts(shared, 300) {
        *counts.entry(prompt[..30].to_vec()).or_default() += 1;
        ends.insert(prompt[30..].to_vec());
    }
    assert_eq!((counts.len(), ends.len()), (3, 300));
    assert!(counts.values().all(|count| (60..=140).contains(count)), "{:?}", counts.values());
}

#[test]
fn words_have_the_length_that_was_drawn() {
    let mut words =
        Synthetic { alphabet: Alphabet::Words, input_tokens: "12".parse().unwrap(), ..synthetic() };
    let Content::Text(text) = words.request().content else { panic!("words are text") };
    assert_eq!(text.split(' ').count(), 12, "{text}");
}

fn check(api: Api, lines: &str) -> Result<(File, Vec<Request>), String> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), lines).unwrap();
    let checked = File::check(file.path(), api, false, Map::from_iter([("top_p".into(), json!(0.5))]));
    // The path is cut off, because it differs from run to run.
    let checked =
        checked.map_err(|error| error.to_string().split_once(" line ").unwrap_or_default().1.to_owned())?;
    let mut requests = Vec::new();
    checked.clone().read(|request| {
        requests.push(request.unwrap());
        true
    });
    Ok((checked, requests))
}

#[test]
fn lines_become_requests() {
    let (file, requests) = check(
        Api::Completions,
        r#"
        {"prompt": "one", "max_tokens": 3, "arrival_s": 0}

        {"prompt": [1, 2], "max_tokens": 4, "arrival_s": 0.25, "body": {"temperature": 0, "top_p": 1}}
        "#,
    )
    .unwrap();
    assert_eq!((file.requests, file.timed), (2, true));
    assert_eq!(requests[0].content, Content::Text("one".into()));
    assert_eq!((requests[0].max_tokens, requests[0].at), (3, Some(Duration::ZERO)));
    assert_eq!(json!(requests[0].extra), json!({ "top_p": 0.5 }));
    assert_eq!(requests[1].content, Content::TokenIds(vec![1, 2]));
    assert_eq!((requests[1].max_tokens, requests[1].at), (4, Some(Duration::from_millis(250))));
    assert_eq!(json!(requests[1].extra), json!({ "top_p": 1, "temperature": 0 }));
    let (file, requests) =
        check(Api::Chat, r#"{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}"#).unwrap();
    assert!(
        !file.timed && matches!(&requests[0].content, Content::Messages(messages) if messages.len() == 1)
    );
}

#[test]
fn a_bad_line_is_refused_by_its_number_and_field() {
    const GOOD: &str = r#"{"prompt": "a", "max_tokens": 1}"#;
    for (api, bad, why) in [
        (Api::Completions, "{", "line: is no JSON: EOF"),
        (Api::Completions, "[1]", "line: is no JSON object"),
        (Api::Completions, r#"{"max_tokens": 1}"#, "prompt: is missing, and so is messages"),
        (Api::Completions, r#"{"prompt": "a"}"#, "max_tokens: is missing"),
        (
            Api::Completions,
            r#"{"prompt": "a", "max_tokens": 0}"#,
            "max_tokens: must be an integer from 1 to 4294967295, and is 0",
        ),
        (
            Api::Completions,
            r#"{"prompt": "a", "max_tokens": "9"}"#,
            "max_tokens: must be an integer from 1 to 4294967295, and is \"9\"",
        ),
        (
            Api::Completions,
            r#"{"prompt": 5, "max_tokens": 1}"#,
            "prompt: must be text or a list of token ids that is not empty, and is 5",
        ),
        (
            Api::Completions,
            r#"{"prompt": [1, -2], "max_tokens": 1}"#,
            "prompt: must hold token ids, and holds -2",
        ),
        (Api::Completions, r#"{"prompt": "a", "max_token": 1}"#, "max_tokens: is missing"),
        (
            Api::Completions,
            r#"{"prompt": "a", "max_tokens": 1, "at": 3}"#,
            "at: is not known; the fields are prompt,",
        ),
        (
            Api::Completions,
            r#"{"prompt": "a", "max_tokens": 1, "arrival_s": -1}"#,
            "arrival_s: must be a number of seconds from 0 on, and is -1",
        ),
        (
            Api::Completions,
            r#"{"prompt": "a", "max_tokens": 1, "body": {"n": 2}}"#,
            "body.n: cannot be set: the generator",
        ),
        (
            Api::Completions,
            r#"{"prompt": "a", "max_tokens": 1, "body": 2}"#,
            "body: must be an object, and is 2",
        ),
        (Api::Completions, r#"{"messages": [], "max_tokens": 1}"#, "messages: need --api chat or --api grpc"),
        (Api::Chat, r#"{"messages": [], "max_tokens": 1}"#, "messages: must hold a message"),
        (
            Api::Chat,
            r#"{"messages": [{"content": "a"}], "max_tokens": 1}"#,
            "messages: must hold objects with a role",
        ),
        (Api::Chat, r#"{"prompt": [1], "max_tokens": 1}"#, "prompt: is token ids, but --api chat takes text"),
        (
            Api::Grpc,
            r#"{"prompt": "a", "max_tokens": 1, "body": {"top_p": 1}}"#,
            "body.top_p: cannot be set over gRPC",
        ),
    ] {
        let error = check(api, &format!("{GOOD}\n\n{bad}\n{GOOD}\n")).unwrap_err();
        assert!(error.starts_with(&format!("3: {why}")), "{bad}: {error}");
    }
}

#[test]
fn times_of_arrival_stand_on_all_lines_or_none_and_never_fall() {
    let line = |at: &str| format!(r#"{{"prompt": "a", "max_tokens": 1{at}}}"#) + "\n";
    let falling = line(r#", "arrival_s": 2"#) + &line(r#", "arrival_s": 1.5"#);
    assert_eq!(
        check(Api::Completions, &falling).unwrap_err(),
        "2: arrival_s: is 1.5 s, which is before the line above"
    );
    let missing = line(r#", "arrival_s": 2"#) + &line("");
    assert!(check(Api::Completions, &missing).unwrap_err().starts_with("2: arrival_s: is missing"));
    let late = line("") + &line(r#", "arrival_s": 2"#);
    assert!(check(Api::Completions, &late).unwrap_err().starts_with("2: arrival_s: is given, though"));
}
