use super::*;
use crate::served::TextFiles;

#[test]
fn the_request_limit_makes_no_difference_and_any_other_is_named() {
    let description = ModelDescription {
        served_name: "tiny".into(),
        vocab_size: 8,
        max_request_tokens: 5,
        ..Default::default()
    };
    let files = TextFiles { tokenizer: Some(vec![1]), ..TextFiles::default() };
    let first = Identity::new(&description, files.digest());
    let differs = |change: &dyn Fn(&mut ModelDescription, &mut TextFiles)| {
        let (mut description, mut files) = (description.clone(), files.clone());
        change(&mut description, &mut files);
        Identity::new(&description, files.digest()).difference(&first)
    };
    assert_eq!(differs(&|d, _| d.max_request_tokens = 9), None);
    assert!(differs(&|d, _| d.served_name = "other".into()).unwrap().contains("\"other\""));
    assert!(differs(&|d, _| d.vocab_size = 9).unwrap().contains("another model"));
    assert!(differs(&|_, f| f.tokenizer = Some(vec![2])).unwrap().contains("tokenizer"));
}
