use super::*;

/// Returns a file with this header and `data` bytes of data.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

const TWO: &str = r#"{"__metadata__":{"format":"pt"},
        "a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},
        "b":{"dtype":"BF16","shape":[3],"data_offsets":[16,22]}}"#;

#[test]
fn a_sound_file_is_read() {
    let header = Header::parse(&file(TWO, 22)).unwrap();
    assert_eq!(header.tensors.len(), 2);
    assert_eq!(header.tensors["b"].data_offsets, (16, 22));
}

#[test]
fn a_truncated_file_names_the_tensor_that_is_cut() {
    let error = Header::parse(&file(TWO, 20)).unwrap_err();
    assert_eq!(error.tensor.as_deref(), Some("b"));
    assert!(error.problem.contains("truncated") && error.problem.contains("20 bytes"), "{error:?}");
}

#[test]
fn a_file_cut_within_its_header_names_no_tensor() {
    let whole = file(TWO, 22);
    for cut in [0, 7, 8, 40] {
        let error = Header::parse(&whole[..cut]).unwrap_err();
        assert_eq!(error.tensor, None, "{error:?}");
    }
}

#[test]
fn a_shape_that_does_not_fit_its_bytes_names_both() {
    let error = Header::parse(&file(&TWO.replace("[2,2]", "[2,3]"), 22)).unwrap_err();
    assert_eq!(error.tensor.as_deref(), Some("a"));
    assert!(error.problem.contains("24 bytes") && error.problem.contains("0..16"), "{error:?}");
}

#[test]
fn a_name_that_occurs_twice_is_refused() {
    let error = Header::parse(&file(&TWO.replace("\"b\"", "\"a\""), 22)).unwrap_err();
    assert!(error.problem.contains("\"a\" occurs twice"), "{error:?}");
}

#[test]
fn bytes_beyond_the_last_tensor_are_refused() {
    assert!(Header::parse(&file(TWO, 30)).unwrap_err().problem.contains("8 bytes follow"));
}

#[test]
fn a_shape_whose_size_overflows_is_refused() {
    let error = Header::parse(&file(&TWO.replace("[2,2]", "[4294967296,4294967296]"), 22)).unwrap_err();
    assert!(error.problem.contains("too large"), "{error:?}");
}

#[test]
fn a_header_that_is_too_long_is_not_parsed() {
    // The header really has this length. Most of it is blanks, which JSON permits before the object.
    let mut long = (MAX_HEADER_BYTES + 1).to_le_bytes().to_vec();
    long.resize(8 + MAX_HEADER_BYTES as usize + 1 - 2, b' ');
    long.extend(b"{}");
    let error = Header::parse(&long).unwrap_err();
    assert!(error.problem.contains("the limit is 33554432"), "{}", error.problem);
    long[..8].copy_from_slice(&MAX_HEADER_BYTES.to_le_bytes());
    long.remove(8);
    assert!(Header::parse(&long).is_ok());
}
