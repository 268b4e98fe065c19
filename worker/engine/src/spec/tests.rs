use tutti_proto::CacheSalt;

use super::*;

fn limits() -> Limits {
    Limits {
        vocab_size: 8,
        max_context_tokens: 64,
        eos_token_ids: vec![7],
        max_step_tokens: 16,
        steps_in_flight: 1,
    }
}

fn key() -> GraphKey {
    pb::GraphKey::default().into()
}

fn message() -> pb::LaunchGraph {
    pb::LaunchGraph {
        key: None,
        walks: vec![0, 1],
        spec: Some(pb::RequestSpec {
            prompt: vec![1, 2, 3],
            sampling: Some(pb::SamplingParams {
                temperature: 1.0,
                top_p: 1.0,
                repetition_penalty: 1.0,
                ..Default::default()
            }),
            stopping: Some(pb::Stopping { max_tokens: 4, ..Default::default() }),
            logprobs: None,
            prompt_logprobs: None,
            priority: -3,
            media: vec![],
            cache_salt: vec![5; 16],
            ..Default::default()
        }),
        generated: vec![],
        timeout_ms: Some(40),
        ..Default::default()
    }
}

/// Applies `change` to a valid spec, and returns the field that the error names.
fn fault(change: impl FnOnce(&mut pb::RequestSpec)) -> String {
    let mut message = message();
    change(message.spec.as_mut().unwrap());
    let (limits, declaration) = (limits(), ModelDeclaration::new(vec![], vec![], vec![]).unwrap());
    let model = ServedModel { limits: &limits, declaration: &declaration };
    let error = parse(key(), message, model, Duration::ZERO).unwrap_err();
    error.field().unwrap().to_owned()
}

#[test]
fn a_valid_message_passes() {
    let (limits, declaration) = (limits(), ModelDeclaration::new(vec![], vec![], vec![]).unwrap());
    let model = ServedModel { limits: &limits, declaration: &declaration };
    let (launch, sequence) = parse(key(), message(), model, Duration::from_secs(1)).unwrap();
    assert_eq!((launch.prefill_tokens(), launch.priority), (3, -3));
    assert_eq!(launch.deadline, Some(Duration::from_millis(1040)));
    assert_eq!(*sequence.prompt, [1, 2, 3]);
    assert_eq!(launch.content.unwrap().salt, CacheSalt::new([5; 16]));
}

#[test]
fn each_bad_value_names_its_field() {
    fn sampling(spec: &mut pb::RequestSpec) -> &mut pb::SamplingParams {
        spec.sampling.as_mut().unwrap()
    }
    assert_eq!(fault(|spec| spec.cache_salt.truncate(1)), "cache_salt");
    assert_eq!(fault(|spec| spec.prompt.clear()), "prompt");
    assert_eq!(fault(|spec| spec.prompt.push(8)), "prompt");
    assert_eq!(fault(|spec| spec.sampling = None), "sampling");
    assert_eq!(fault(|spec| spec.stopping = None), "stopping");
    assert_eq!(fault(|spec| sampling(spec).temperature = f32::NAN), "temperature");
    assert_eq!(fault(|spec| sampling(spec).temperature = -0.1), "temperature");
    assert_eq!(fault(|spec| sampling(spec).top_p = 0.0), "top_p");
    assert_eq!(fault(|spec| sampling(spec).top_p = f32::NAN), "top_p");
    assert_eq!(fault(|spec| sampling(spec).min_p = 1.1), "min_p");
    assert_eq!(fault(|spec| sampling(spec).repetition_penalty = 0.0), "repetition_penalty");
    assert_eq!(fault(|spec| sampling(spec).repetition_penalty = 1e-40), "repetition_penalty");
    assert_eq!(fault(|spec| sampling(spec).presence_penalty = 2.1), "presence_penalty");
    assert_eq!(fault(|spec| sampling(spec).frequency_penalty = f32::INFINITY), "frequency_penalty");
    let bias = |token_id, bias| vec![pb::LogitBias { token_id, bias }];
    assert_eq!(fault(|spec| sampling(spec).logit_bias = bias(8, 0.0)), "logit_bias");
    assert_eq!(fault(|spec| sampling(spec).logit_bias = bias(1, -101.0)), "logit_bias");
    assert_eq!(fault(|spec| sampling(spec).logit_bias = [bias(1, 0.0), bias(1, 0.0)].concat()), "logit_bias");
    assert_eq!(fault(|spec| spec.logprobs = Some(21)), "logprobs");
    assert_eq!(fault(|spec| spec.prompt_logprobs = Some(21)), "prompt_logprobs");
    assert_eq!(fault(|spec| spec.priority = -9), "priority");
    assert_eq!(fault(|spec| spec.stopping.as_mut().unwrap().stop_token_ids = vec![9]), "stop_token_ids");
    assert_eq!(fault(|spec| spec.stopping.as_mut().unwrap().min_tokens = 5), "min_tokens");
}

#[test]
fn every_bound_is_exact_at_the_worker() {
    let good = message().spec.unwrap();
    let total = good.prompt.len() + 4;
    let limits = Limits { vocab_size: 2000, max_context_tokens: total, ..limits() };
    let declaration = ModelDeclaration::new(vec![], vec![], vec![]).unwrap();
    let model = ServedModel { limits: &limits, declaration: &declaration };
    for probe in tutti_proto::probes::probes(&good, limits.vocab_size as u32) {
        let launch = pb::LaunchGraph { spec: Some(probe.spec.clone()), ..message() };
        let parsed = parse(key(), launch, model, Duration::ZERO);
        match &probe.refused {
            None => assert_eq!(Some(parsed.unwrap().1.sampling), probe.spec.sampling),
            Some([value, limit]) => {
                let error = parsed.unwrap_err();
                assert_eq!(error.field(), Some(probe.parameter), "{error}");
                assert!(error.message().contains(value) && error.message().contains(limit), "{error}");
            }
        }
    }
}
