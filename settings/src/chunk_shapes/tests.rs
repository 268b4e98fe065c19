use super::*;

#[test]
fn a_step_gets_the_smallest_shape_that_has_room() {
    let shapes: ChunkShapes = "64, 256,1024".parse().unwrap();
    let fits = [0, 1, 64, 65, 256, 257, 1024, 1025].map(|tokens| shapes.fit(tokens));
    let expected = [Some(64), Some(64), Some(64), Some(256), Some(256), Some(1024), Some(1024), None];
    assert_eq!(fits, expected);
    assert_eq!((shapes.greatest(), shapes.to_string().as_str()), (1024, "64,256,1024"));
}

#[test]
fn shapes_that_no_step_can_have_are_refused_with_the_one_at_fault() {
    for (text, why) in [
        ("", "no shape"),
        ("0,64", "a shape of 0 tokens"),
        ("64,64", "64 after 64"),
        ("64,256,128", "128 after 256"),
        ("64,", "\"\", which is no number"),
        ("many", "\"many\", which is no number"),
        ("-1", "\"-1\", which is no number"),
        ("1048577", "the limit is 1048576"),
    ] {
        let refused = text.parse::<ChunkShapes>().unwrap_err();
        assert!(refused.contains(why), "{text:?}: {refused}");
    }
}

#[test]
fn a_file_may_have_a_list_a_text_or_one_number() {
    let read = |json: &str| serde_json::from_str::<ChunkShapes>(json).map_err(|error| error.to_string());
    for (json, shapes) in [("[64, 256]", "64,256"), ("\"64,256\"", "64,256"), ("64", "64")] {
        let read = read(json).unwrap();
        assert_eq!(read.to_string(), shapes);
        assert_eq!(serde_json::to_string(&read).unwrap().replace(['[', ']'], ""), shapes);
    }
    assert!(read("[]").unwrap_err().contains("no shape"));
    assert!(read("[256, 64]").unwrap_err().contains("64 after 256"));
}
