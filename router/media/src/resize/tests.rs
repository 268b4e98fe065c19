use std::{fs, path::PathBuf};

use safetensors::SafeTensors;

use super::*;

/// Reads a golden tensor: its bytes and its shape.
fn tensor(goldens: &SafeTensors<'_>, name: &str) -> Option<(Vec<u8>, Vec<usize>)> {
    let tensor = goldens.tensor(name).ok()?;
    Some((tensor.data().to_vec(), tensor.shape().to_vec()))
}

/// Runs `check` on what the reference computes.
fn with_goldens(check: impl Fn(&SafeTensors<'_>)) {
    let Some(root) = std::env::var_os("GOLDEN_MODELS").map(PathBuf::from) else {
        eprintln!("skipped: GOLDEN_MODELS is not set");
        return;
    };
    let bytes = fs::read(root.join("preprocess/goldens.safetensors")).unwrap();
    check(&SafeTensors::deserialize(&bytes).unwrap());
}

/// Pictures that are enlarged, that shrink, and that do one in each direction have the bytes of Pillow.
#[test]
fn pixels_are_those_of_pillow() {
    with_goldens(|goldens| {
        let mut pictures = 0;
        while let Some((pixels, from)) = tensor(goldens, &format!("resize{pictures}.rgb")) {
            let (expected, to) = tensor(goldens, &format!("resize{pictures}.resized")).unwrap();
            let found = resize(&pixels, [from[0], from[1]], [to[0], to[1]]).unwrap();
            assert!(found == expected, "picture {pictures}: {from:?} to {to:?}");
            pictures += 1;
        }
        assert!(pictures >= 24, "{pictures} pictures");
    });
}

#[test]
fn sizes_are_those_of_transformers() {
    with_goldens(|goldens| {
        let (bytes, shape) = tensor(goldens, "sizes").unwrap();
        let numbers: Vec<usize> =
            bytes.as_chunks::<8>().0.iter().map(|number| i64::from_le_bytes(*number) as usize).collect();
        assert_eq!(shape[1], 7);
        for row in numbers.as_chunks::<7>().0 {
            let &[factor, least, most, height, width, to_height, to_width] = row;
            let found = SizeLimits { factor, least, most }.size([height, width]);
            assert_eq!(found, Ok([to_height, to_width]), "{row:?}");
        }
        assert!(shape[0] >= 200);
    });
}

#[test]
fn halves_are_rounded_to_even_tokens() {
    let limits = SizeLimits { factor: 32, least: 32 * 32, most: 1 << 20 };
    assert_eq!(limits.size([80, 112]), Ok([64, 128]));
    assert_eq!(limits.size([48, 144]), Ok([64, 128]));
}

#[test]
fn pictures_without_a_size_are_refused() {
    let limits = SizeLimits { factor: 32, least: 4096, most: 16_384 };
    assert_eq!(limits.size([0, 10]), Err(SizeError::Empty));
    assert_eq!(limits.size([1, 201]), Err(SizeError::Aspect));
    assert!(limits.size([1, 200]).is_ok());
    assert!(limits.size([usize::MAX, usize::MAX]).is_ok());
    assert_eq!(SizeLimits { factor: 32, least: 0, most: 16_384 }.size([3, 3]), Err(SizeError::Limits));
    assert!(SizeError::Aspect.to_string().contains("more than 200 times"));
    for (from, to) in [([2, 2], [0, 4]), ([2, 0], [4, 4]), ([2, 3], [4, 4]), ([usize::MAX, 2], [4, 4])] {
        assert!(resize(&[0; 12], from, to).is_none(), "{from:?}");
    }
    assert_eq!(resize(&[7; 12], [2, 2], [2, 2]), Some(vec![7; 12]));
}

/// Rows of transformers 5.23 (`video_processing_qwen3_vl.smart_resize`): frames, height, width, factor, limits, and the
/// size.
const VIDEOS: [[usize; 8]; 12] = [
    [2, 64, 64, 32, 4096, 1_048_576, 64, 64],
    [3, 100, 30, 32, 4096, 786_432, 96, 32],
    [5, 500, 700, 32, 131_072, 786_432, 320, 448],
    [6, 20, 300, 32, 131_072, 786_432, 64, 576],
    [7, 33, 47, 28, 3136, 50_176, 28, 56],
    [9, 1080, 1920, 32, 131_072, 786_432, 192, 384],
    [16, 720, 1280, 32, 131_072, 25_165_824, 704, 1280],
    [2, 10, 12, 8, 1024, 4096, 24, 32],
    [5, 10, 12, 8, 1024, 4096, 16, 16],
    [3, 7, 50, 8, 1024, 2048, 8, 56],
    [11, 40, 41, 8, 1024, 65_536, 40, 40],
    [4, 48, 80, 32, 1024, 1_048_576, 64, 64],
];

#[test]
fn sizes_of_videos_are_those_of_transformers() {
    for [frames, height, width, factor, least, most, to_height, to_width] in VIDEOS {
        let found = SizeLimits { factor, least, most }.video_size(frames, 2, [height, width]);
        assert_eq!(found, Ok([to_height, to_width]), "{frames} frames of {height} × {width}");
    }
    let limits = SizeLimits { factor: 32, least: 4096, most: 1 << 20 };
    // The reference takes no single frame. It is repeated, so it has the size of two.
    assert_eq!(limits.video_size(1, 2, [64, 96]), limits.video_size(2, 2, [64, 96]));
    assert_eq!(limits.video_size(2, 2, [64, 0]), Err(SizeError::Empty));
    assert_eq!(limits.video_size(2, 2, [40, 8001]), Err(SizeError::Aspect));
}
