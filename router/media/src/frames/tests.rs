use png::ColorType;

use super::*;
use crate::picture::tests::{Counted, budget, png};

fn frame(width: u32, height: u32, colour: u8) -> Vec<u8> {
    png(width, height, ColorType::Rgb, &vec![colour; (width * height * 3) as usize])
}

fn decode(frames: &[Vec<u8>], memory: &mut Counted) -> Result<Frames, MediaError> {
    let files: Vec<&[u8]> = frames.iter().map(Vec::as_slice).collect();
    decode_frames(&files, &mut budget(memory), |_| Ok([4, 6]))
}

#[test]
fn frames_stand_one_behind_the_other_in_one_size() {
    let mut memory = Counted { limit: 1 << 30, ..Counted::default() };
    let frames = decode(&[frame(5, 4, 1), frame(5, 4, 2), frame(5, 4, 3)], &mut memory).unwrap();
    assert_eq!((frames.size, frames.count), ([4, 6], 3));
    let expected: Vec<u8> = [1, 2, 3].iter().flat_map(|colour| [*colour; 4 * 6 * 3]).collect();
    assert_eq!(frames.pixels, expected);
    assert_eq!(memory.taken, expected.len());
}

#[test]
fn a_frame_of_another_size_and_a_damaged_one_are_named() {
    let mut memory = Counted { limit: 1 << 30, ..Counted::default() };
    let other = decode(&[frame(5, 4, 1), frame(4, 5, 2)], &mut memory);
    assert_eq!(other, Err(MediaError::OtherSize { index: 1 }));
    let damaged = decode(&[frame(5, 4, 1), b"x".to_vec()], &mut memory).unwrap_err();
    assert_eq!(damaged.to_string(), "frame 1 is neither a JPEG, a PNG nor a WebP picture");
    assert_eq!(decode(&[], &mut memory), Err(MediaError::NoFrames));
}
