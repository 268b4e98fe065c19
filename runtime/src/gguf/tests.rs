use super::*;

/// Writes a file with metadata and tensors of type F32.
fn file(metadata: &[(&str, u32, Vec<u8>)], tensors: &[(&str, &[u64], u32, u64)], data: usize) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(3u32.to_le_bytes());
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend((metadata.len() as u64).to_le_bytes());
    let text = |bytes: &mut Vec<u8>, text: &str| {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
    };
    for (key, kind, value) in metadata {
        text(&mut bytes, key);
        bytes.extend(kind.to_le_bytes());
        bytes.extend(value);
    }
    for (name, shape, dtype, offset) in tensors {
        text(&mut bytes, name);
        bytes.extend((shape.len() as u32).to_le_bytes());
        shape.iter().for_each(|n| bytes.extend(n.to_le_bytes()));
        bytes.extend(dtype.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
    }
    bytes.resize(bytes.len().next_multiple_of(32) + data, 0);
    bytes
}

fn read(bytes: &[u8]) -> Result<Header, String> {
    Header::read(bytes, bytes.len() as u64)
}

#[test]
fn a_header_has_its_metadata_and_its_tensors() {
    let list = [
        4u32.to_le_bytes().to_vec(),
        2u64.to_le_bytes().to_vec(),
        7u32.to_le_bytes().to_vec(),
        8u32.to_le_bytes().to_vec(),
    ];
    let bytes = file(
        &[("a", 4, 5u32.to_le_bytes().to_vec()), ("b", 9, list.concat()), ("c", 7, vec![1])],
        &[("x", &[4, 2], 0, 0), ("y", &[32, 3], 8, 32)],
        32 + 3 * 34,
    );
    let header = read(&bytes).unwrap();
    assert_eq!(header.integer("a"), Ok(Some(5)));
    assert_eq!(header.metadata["b"], Value::Integers(vec![7, 8]));
    assert_eq!(header.flag("c"), Ok(Some(true)));
    let y = &header.tensors["y"];
    assert_eq!((y.shape.as_slice(), y.dtype, y.bytes.len()), (&[3, 32][..], TensorType::Q8_0, 102));
    assert_eq!(y.bytes.end, bytes.len());
}

#[test]
fn a_header_that_claims_more_than_the_file_holds_is_refused() {
    let huge = |kind: u32| [kind.to_le_bytes().to_vec(), (1u64 << 60).to_le_bytes().to_vec()].concat();
    let one = |shape: &[u64], dtype, offset| file(&[], &[("x", shape, dtype, offset)], 64);
    let twice = file(&[], &[("x", &[8], 0, 0), ("y", &[8], 0, 0)], 64);
    let mut entries = file(&[], &[], 0);
    entries[16..24].copy_from_slice(&(1u64 << 60).to_le_bytes());
    for (bytes, word) in [
        (file(&[("k", 9, huge(8))], &[], 64), "\"k\""),
        (file(&[("k", 9, huge(0))], &[], 64), "lists may have"),
        (
            file(&[("k", 9, [0u32.to_le_bytes().to_vec(), 99u64.to_le_bytes().to_vec()].concat())], &[], 0),
            "truncated",
        ),
        (file(&[("k", 8, (1u64 << 60).to_le_bytes().to_vec())], &[], 64), "limit"),
        (file(&[("k", 9, huge(9))], &[], 64), "list of lists"),
        (file(&[("k", 13, vec![])], &[], 64), "type 13"),
        (entries, "truncated"),
        (one(&[17], 0, 0), "truncated"),
        (one(&[8], 0, 64), "truncated"),
        (one(&[8], 0, u64::MAX - 31), "truncated"),
        (one(&[1 << 40, 1 << 40], 0, 0), "too large"),
        (one(&[1 << 62], 0, 0), "too large"),
        (one(&[8], 0, 4), "alignment"),
        (one(&[33], 8, 0), "block of 32"),
        (one(&[256], 10, 0), "type 10"),
        (twice, "overlaps"),
        (b"GGUF".to_vec(), "truncated"),
        (b"lmgg\x03\0\0\0".to_vec(), "no GGUF"),
    ] {
        let error = read(&bytes).unwrap_err();
        assert!(error.contains(word), "{word}: {error}");
    }
    let whole = file(&[("a", 4, vec![0; 4])], &[("x", &[8], 0, 0)], 32);
    read(&whole).unwrap();
    for length in 0..whole.len() {
        read(&whole[..length]).unwrap_err();
    }
}
