use super::*;
use crate::gguf::Value as Metadata;

/// Writes a file of one tensor without metadata, and reads the divisors of a model of this file.
fn read(name: &str, dtype: u32, values: &[f32]) -> Result<Option<Vec<f32>>, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3u32.to_le_bytes());
    bytes.extend([1u64, 0, name.len() as u64].map(u64::to_le_bytes).concat());
    bytes.extend(name.as_bytes());
    bytes.extend(1u32.to_le_bytes());
    bytes.extend((values.len() as u64).to_le_bytes());
    bytes.extend(dtype.to_le_bytes());
    bytes.extend(0u64.to_le_bytes());
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    std::fs::write(&path, bytes).unwrap();
    let header = Header::open(&path).unwrap();
    divisors(&[path], &header)
}

fn scaled(kind: Option<&str>, divisors: Option<Vec<f32>>) -> Result<Option<Value>, String> {
    let text = |kind: &str| ("llama.rope.scaling.type".to_owned(), Metadata::Text(kind.into()));
    let header = Header { metadata: kind.map(text).into_iter().collect(), tensors: Default::default() };
    scaling(&header, divisors, &|key| format!("llama.{key}"))
}

#[test]
fn divisors_are_a_part_of_the_config() {
    let found = read(ROTARY_DIVISORS, 0, &[1.0, 1.5, 8.0]).unwrap();
    assert_eq!(found, Some(vec![1.0, 1.5, 8.0]));
    let wanted = json!({ "rope_type": "divisors", "divisors": [1.0, 1.5, 8.0] });
    assert_eq!(scaled(None, found.clone()), Ok(Some(wanted.clone())));
    assert_eq!(scaled(Some("none"), found), Ok(Some(wanted)));
    assert_eq!(read("other.weight", 0, &[1.0]), Ok(None));
    assert_eq!(scaled(None, None), Ok(None));
}

#[test]
fn divisors_that_are_none_are_named() {
    for (dtype, values, word) in [
        (0, &[1.0, 0.0][..], "0 divides"),
        (0, &[-8.0], "-8 divides"),
        (0, &[f32::NAN], "NaN divides"),
        (0, &[f32::INFINITY], "inf divides"),
        (1, &[1.0], "F16"),
        (0, &[1.0; MAX_BYTES / 4 + 1], "shape"),
    ] {
        let error = read(ROTARY_DIVISORS, dtype, values).unwrap_err();
        assert!(error.contains(ROTARY_DIVISORS) && error.contains(word), "{word}: {error}");
    }
    let error = scaled(Some("yarn"), Some(vec![1.0])).unwrap_err();
    assert!(error.contains("llama.rope.scaling.type") && error.contains(ROTARY_DIVISORS), "{error}");
}
