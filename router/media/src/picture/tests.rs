use std::time::{Duration, Instant};

use super::*;
use crate::{Memory, Unlimited};

/// Memory that counts what is taken, up to a limit.
#[derive(Default)]
pub(crate) struct Counted {
    pub limit: usize,
    pub taken: usize,
    pub most: usize,
}

impl Memory for Counted {
    fn take(&mut self, bytes: usize) -> bool {
        let fits = self.taken.saturating_add(bytes) <= self.limit;
        if fits {
            self.taken += bytes;
            self.most = self.most.max(self.taken);
        }
        fits
    }

    fn give(&mut self, bytes: usize) {
        self.taken -= bytes;
    }
}

pub(crate) fn budget(memory: &mut dyn Memory) -> Budget<'_> {
    Budget { memory, pixels: 1 << 20, samples: 1 << 20, deadline: Instant::now() + Duration::from_secs(60) }
}

fn own(data: &[u8]) -> Result<Picture, MediaError> {
    decode_picture(data, &mut budget(&mut Unlimited), Ok)
}

/// A PNG of these samples.
pub(crate) fn png(width: u32, height: u32, colour: ColorType, samples: &[u8]) -> Vec<u8> {
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, width, height);
    encoder.set_color(colour);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header().unwrap();
    writer.write_image_data(samples).unwrap();
    drop(writer);
    file
}

/// The colours in the corners of the fixtures.
fn corners(picture: &Picture) -> [[u8; 3]; 4] {
    let [height, width] = picture.size;
    [(2, 2), (2, width - 3), (height - 3, 2), (height - 3, width - 3)].map(|(y, x)| {
        let at = (y * width + x) * CHANNELS;
        [picture.pixels[at], picture.pixels[at + 1], picture.pixels[at + 2]]
    })
}

const RED: [u8; 3] = [200, 30, 30];
const GREEN: [u8; 3] = [30, 200, 30];
const BLUE: [u8; 3] = [30, 30, 200];
const YELLOW: [u8; 3] = [220, 220, 40];

#[track_caller]
fn near(found: [[u8; 3]; 4], expected: [[u8; 3]; 4], most: u8) {
    let difference = |(a, b): (&u8, &u8)| a.abs_diff(*b);
    let differences = found.as_flattened().iter().zip(expected.as_flattened()).map(difference);
    assert!(differences.max() <= Some(most), "{found:?}, not {expected:?}");
}

#[test]
fn each_format_gives_its_pixels() {
    let jpeg = own(include_bytes!("fixtures/corners.jpg")).unwrap();
    assert_eq!(jpeg.size, [16, 24]);
    near(corners(&jpeg), [RED, GREEN, BLUE, YELLOW], 4);
    let progressive = own(include_bytes!("fixtures/progressive.jpg")).unwrap();
    near(corners(&progressive), [RED, GREEN, BLUE, YELLOW], 4);
    let grey = own(include_bytes!("fixtures/grey.jpg")).unwrap();
    assert!(grey.pixels.as_chunks::<3>().0.iter().all(|[r, g, b]| r == g && g == b));
    let lossy = own(include_bytes!("fixtures/lossy.webp")).unwrap();
    near(corners(&lossy), [RED, GREEN, BLUE, YELLOW], 24);
    let half = |colour: u8| colour.midpoint(255) - 1;
    let clear = own(include_bytes!("fixtures/clear.webp")).unwrap();
    near(corners(&clear), [RED, GREEN, BLUE, YELLOW].map(|colour| colour.map(half)), 1);
    // The first of two frames, whose colours are those of the second inverted.
    let animated = own(include_bytes!("fixtures/animated.webp")).unwrap();
    near(corners(&animated), [RED, GREEN, BLUE, YELLOW], 0);
}

#[test]
fn the_colours_of_printers_are_decoded() {
    near(corners(&own(include_bytes!("fixtures/cmyk.jpg")).unwrap()), [RED, GREEN, BLUE, YELLOW], 8);
}

#[test]
fn a_camera_s_orientation_turns_the_picture() {
    let turned = own(include_bytes!("fixtures/turned.jpg")).unwrap();
    assert_eq!(turned.size, [24, 16]);
    near(corners(&turned), [BLUE, RED, YELLOW, GREEN], 4);
}

#[test]
fn lossless_files_of_the_same_pixels_have_one_canonical_form() {
    let pixels: Vec<u8> = (0..40 * 30 * 3).map(|i| (i * 7 % 251) as u8).collect();
    let png = png(40, 30, ColorType::Rgb, &pixels);
    let mut webp = Vec::new();
    image_webp::WebPEncoder::new(&mut webp).encode(&pixels, 40, 30, image_webp::ColorType::Rgb8).unwrap();
    let [png, webp] =
        [png, webp].map(|file| decode_picture(&file, &mut budget(&mut Unlimited), |_| Ok([32, 32])));
    assert_eq!(png, webp);
    assert_eq!(Some(png.unwrap().pixels), crate::resize(&pixels, [30, 40], [32, 32]));
}

#[test]
fn every_kind_of_png_becomes_red_green_and_blue_on_white() {
    let grey = own(&png(2, 1, ColorType::Grayscale, &[7, 250])).unwrap();
    assert_eq!(grey.pixels, [7, 7, 7, 250, 250, 250]);
    let clear = own(&png(3, 1, ColorType::GrayscaleAlpha, &[0, 0, 0, 255, 10, 128])).unwrap();
    assert_eq!(clear.pixels, [255, 255, 255, 0, 0, 0, 132, 132, 132]);
    let colour = own(&png(2, 1, ColorType::Rgba, &[1, 2, 3, 255, 1, 2, 3, 0])).unwrap();
    assert_eq!(colour.pixels, [1, 2, 3, 255, 255, 255]);
    let mut palette = Vec::new();
    let mut encoder = png::Encoder::new(&mut palette, 2, 1);
    encoder.set_color(ColorType::Indexed);
    encoder.set_depth(png::BitDepth::One);
    encoder.set_palette(vec![1, 2, 3, 4, 5, 6]);
    encoder.set_trns(vec![255, 0]);
    encoder.write_header().unwrap().write_image_data(&[0b0100_0000]).unwrap();
    assert_eq!(own(&palette).unwrap().pixels, [1, 2, 3, 255, 255, 255]);
}

#[test]
fn too_many_pixels_are_refused_by_the_header_alone() {
    // A header of 65,535 times 65,535 pixels, without any.
    let mut huge = Vec::new();
    png::Encoder::new(&mut huge, 65_535, 65_535).write_header().unwrap();
    let mut memory = Counted { limit: 8 << 20, ..Counted::default() };
    let refused = decode_picture(&huge, &mut budget(&mut memory), Ok).unwrap_err();
    assert_eq!(refused, MediaError::TooManyPixels { width: 65_535, height: 65_535, limit: 1 << 20 });
    assert_eq!(memory.taken, 0, "all is given back");
    let mut jpeg = include_bytes!("fixtures/corners.jpg").to_vec();
    let frame = jpeg.windows(2).position(|marker| marker == [0xff, 0xc0]).unwrap();
    jpeg[frame + 5..frame + 9].fill(0xff);
    let refused = decode_picture(&jpeg, &mut budget(&mut memory), Ok).unwrap_err();
    assert!(matches!(refused, MediaError::TooManyPixels { .. }), "{refused}");
    assert!(memory.most <= OVERHEAD);
}

#[test]
fn memory_is_taken_before_it_is_needed_and_given_back() {
    let pixels = vec![9; 200 * 100 * 3];
    let file = png(200, 100, ColorType::Rgb, &pixels);
    let mut memory = Counted { limit: 1 << 30, ..Counted::default() };
    decode_picture(&file, &mut budget(&mut memory), |_| Ok([64, 64])).unwrap();
    assert_eq!(memory.taken, 64 * 64 * 3, "the canonical form stays taken");
    let most = memory.most;
    for limit in [most - 1, OVERHEAD, 0] {
        let mut memory = Counted { limit, ..Counted::default() };
        let refused = decode_picture(&file, &mut budget(&mut memory), |_| Ok([64, 64])).unwrap_err();
        assert!(matches!(refused, MediaError::NoMemory(_)), "{refused}");
        assert_eq!(memory.taken, 0);
    }
}

#[test]
fn decoding_stops_at_the_deadline() {
    let file = png(20, 10, ColorType::Rgb, &[9; 600]);
    let mut memory = Counted { limit: 1 << 30, ..Counted::default() };
    let mut late = Budget { deadline: Instant::now(), ..budget(&mut memory) };
    assert_eq!(decode_picture(&file, &mut late, Ok), Err(MediaError::TooSlow));
    assert_eq!(memory.taken, 0);
}

#[test]
fn no_cut_or_changed_file_panics_or_keeps_memory() {
    let png = png(9, 7, ColorType::Rgba, &[77; 9 * 7 * 4]);
    let files: [&[u8]; 6] = [
        &png,
        include_bytes!("fixtures/turned.jpg"),
        include_bytes!("fixtures/progressive.jpg"),
        include_bytes!("fixtures/lossy.webp"),
        include_bytes!("fixtures/clear.webp"),
        include_bytes!("fixtures/animated.webp"),
    ];
    let check = |data: &[u8]| {
        let mut memory = Counted { limit: 64 << 20, ..Counted::default() };
        let decoded =
            decode_picture(data, &mut budget(&mut memory), |own| Ok(own.map(|side| side.clamp(1, 64))));
        assert_ne!(decoded, Err(MediaError::Failed));
        assert_eq!(memory.taken, decoded.map_or(0, |picture| picture.pixels.len()));
    };
    for file in files {
        (0..file.len()).for_each(|end| check(&file[..end]));
        for at in 0..file.len() {
            let mut changed = file.to_vec();
            for bits in [0x01, 0x80, 0xff] {
                changed[at] = file[at] ^ bits;
                check(&changed);
            }
        }
    }
}

#[test]
fn other_files_are_no_pictures() {
    for data in [&b""[..], b"GIF89a", b"BM", b"<svg/>", b"RIFF\0\0\0\0WAVE", b"\x89PN"] {
        assert_eq!(own(data), Err(MediaError::NoPicture));
    }
}
