use tutti_models::Limits;

use super::*;

fn largest(max_step_tokens: usize, max_running_requests: usize, context: usize) -> Largest {
    let limits = Limits {
        vocab_size: 100,
        max_context_tokens: context,
        eos_token_ids: Vec::new(),
        max_step_tokens,
        steps_in_flight: 2,
    };
    let max_running_requests = Some(max_running_requests);
    let settings = EngineSettings { max_step_tokens, max_running_requests, ..EngineSettings::default() };
    Largest::of(&limits, &settings, 16)
}

#[test]
fn the_largest_step_has_as_many_tokens_and_rows_as_a_step_may_have() {
    for (step, requests, context) in [(512, 128, 4096), (512, 3, 4096), (8, 128, 4096), (100, 7, 1000)] {
        let largest = largest(step, requests, context);
        assert_eq!(largest.rows.len(), requests.min(step));
        assert_eq!(largest.rows.iter().sum::<usize>(), step);
        assert!(largest.rows.iter().all(|&tokens| tokens > 0 && tokens <= context));
        assert_eq!((largest.ids.len(), largest.positions.len()), (step, step));
        assert!(largest.block_table.len() * 16 >= context);
    }
}

#[test]
fn a_row_is_no_longer_than_the_context() {
    let largest = largest(512, 2, 100);
    assert_eq!(largest.rows, [100, 100]);
    assert_eq!((largest.ids.len(), largest.logit_rows.len()), (200, 200));
}
