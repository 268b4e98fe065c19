//! Checks that every field of a request's messages is in the declaration of parameters, and that every field that the
//! declaration names exists.

#![allow(clippy::unwrap_used)] // A failed unwrap is a failed test.

use std::{collections::BTreeSet, path::Path};

use tutti_proto::parameters::{
    self, BIAS, BIASES, DEFAULT_MAX_TOKENS, LOGPROBS, N, NUMBERS, PRIORITY, PROMPT_LOGPROBS, STOP_TOKEN_IDS,
    STOPS,
};

/// Returns the fields of a message in `tutti/v1/inference.proto` or `tutti/cluster/v1/request.proto`.
fn fields(file: &str, message: &str) -> BTreeSet<String> {
    let protos = Path::new(env!("CARGO_MANIFEST_DIR")).join("protos");
    let all = protox::compile([file], [protos]).unwrap();
    // Without the files that this one imports.
    let messages = all.file.iter().filter(|found| found.name() == file).flat_map(|file| &file.message_type);
    let found = messages.filter(|found| found.name() == message).collect::<Vec<_>>();
    assert_eq!(found.len(), 1, "{message}");
    found[0].field.iter().map(|field| field.name().to_owned()).collect()
}

#[test]
fn every_field_of_the_clients_message_is_declared() {
    let of = |message| fields("tutti/v1/inference.proto", message);
    let mut found = of("GenerateRequest");
    for (field, message) in [("sampling", "Sampling"), ("stopping", "Stopping"), ("output", "Output")] {
        assert!(found.remove(field));
        found.extend(of(message).into_iter().map(|inner| format!("{field}.{inner}")));
    }
    let declared: BTreeSet<String> =
        parameters::all().flat_map(|parameter| parameter.grpc).map(|&field| field.to_owned()).collect();
    assert_eq!(found, declared);
}

#[test]
fn every_field_of_the_cluster_s_message_is_declared() {
    let of = |message| fields("tutti/cluster/v1/request.proto", message);
    let mut found = of("RequestSpec");
    for (field, message) in [("sampling", "SamplingParams"), ("stopping", "Stopping")] {
        assert!(found.remove(field));
        found.extend(of(message));
    }
    // Clients ask for it in parameters of other names: the router finds the tokens in the chat template.
    assert!(found.remove("thinking"));
    for field in found {
        assert!(parameters::all().any(|parameter| parameter.name == field), "{field} is not declared");
    }
}

/// Returns the comment before a field in `tutti/v1/inference.proto`.
fn comment(field: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("protos/tutti/v1/inference.proto");
    let text = std::fs::read_to_string(path).unwrap();
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let at = lines.iter().position(|line| line.contains(&format!(" {field} = "))).unwrap();
    let first = lines[..at].iter().rposition(|line| !line.starts_with("//")).unwrap() + 1;
    lines[first..at].iter().map(|line| line.trim_start_matches("//")).collect()
}

#[test]
fn comments_of_the_clients_message_name_the_ranges() {
    for number in &NUMBERS {
        let (name, range) = (number.bounds.name, number.bounds.range);
        let open = if range.excludes_low { "(" } else { "[" };
        let words = format!("in {open}{}, {}]. Default {}.", range.low, range.high, number.default);
        assert!(comment(name).contains(&words), "{name}: {words}");
    }
    let each = format!("each in [{}, {}].", BIAS.range.low, BIAS.range.high);
    assert!(comment(BIAS.name).contains(&each));
    for bounds in [N, PRIORITY] {
        assert!(comment(bounds.name).contains(&bounds.range.to_string()), "{}", bounds.name);
    }
    let at_most = [
        (LOGPROBS.name, LOGPROBS.range.high as usize),
        (PROMPT_LOGPROBS.name, PROMPT_LOGPROBS.range.high as usize),
        (STOPS.name, STOPS.range.most),
        (STOP_TOKEN_IDS.name, STOP_TOKEN_IDS.range.most),
        (BIASES.name, BIASES.range.most),
    ];
    for (name, most) in at_most {
        assert!(comment(name).contains(&format!("At most {most}.")), "{name}");
    }
    assert!(comment("max_tokens").contains(&format!("Default {DEFAULT_MAX_TOKENS},")));
}
