use prost::Message;

use super::*;

#[test]
fn a_token_takes_at_most_the_counted_bytes_on_the_wire() {
    let top = pb::TopLogprob { token_id: u32::MAX, logprob: f32::MIN };
    let token = pb::TokenLogprob { logprob: f32::MIN, rank: u32::MAX, top: vec![top; MAX_LOGPROBS as usize] };
    let one = pb::PromptLogprobs { first: 0, tokens: vec![token] };
    assert!(one.encoded_len() <= encoded(), "{} of {}", one.encoded_len(), encoded());
    assert!(
        one.encoded_len() * 2 > encoded(),
        "nor is far more counted: {} of {}",
        one.encoded_len(),
        encoded()
    );
}
