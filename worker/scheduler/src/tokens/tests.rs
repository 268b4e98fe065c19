use super::*;

#[test]
fn tokens_on_both_sides_of_the_prompts_end_are_those_of_one_list() {
    let all: Vec<u32> = (0..9).collect();
    for prompt in 0..=9 {
        let mut tokens = Tokens::new(all[..prompt].into(), Vec::new());
        all[prompt..].iter().for_each(|token| tokens.push(*token));
        assert_eq!((tokens.len(), tokens.is_empty()), (9, false));
        for start in 0..9 {
            for end in start..=9 {
                assert_eq!(*tokens.at(start..end), all[start..end], "{start}..{end} of {prompt}");
            }
        }
    }
}
