use std::time::{Duration, Instant};

use super::*;
use crate::picture::tests::{Counted, budget};

/// A WAV file. `format` is 1 for integers and 3 for floats.
fn wav(format: u16, channels: u16, rate: u32, bits: u16, data: &[u8]) -> Vec<u8> {
    let block = channels * bits / 8;
    let mut file = b"RIFF".to_vec();
    file.extend((36 + data.len() as u32).to_le_bytes());
    file.extend(b"WAVEfmt \x10\0\0\0");
    [format, channels].iter().for_each(|value| file.extend(value.to_le_bytes()));
    [rate, rate * u32::from(block)].iter().for_each(|value| file.extend(value.to_le_bytes()));
    [block, bits].iter().for_each(|value| file.extend(value.to_le_bytes()));
    file.extend(b"data");
    file.extend((data.len() as u32).to_le_bytes());
    file.extend(data);
    file
}

fn floats(samples: &[f32]) -> Vec<u8> {
    samples.iter().flat_map(|sample| sample.to_le_bytes()).collect()
}

fn shorts(samples: &[i16]) -> Vec<u8> {
    samples.iter().flat_map(|sample| sample.to_le_bytes()).collect()
}

/// Frames of an MP3 at 44.1 kHz, in stereo: silence, 1152 samples each.
fn mp3(frames: usize) -> Vec<u8> {
    let mut frame = vec![0xff, 0xfb, 0x90, 0x00];
    frame.resize(417, 0);
    frame.repeat(frames)
}

fn crc(bytes: &[u8], bits: u32, polynomial: u32) -> u32 {
    let (top, mask) = (1 << (bits - 1), ((1u64 << bits) - 1) as u32);
    bytes.iter().fold(0, |sum: u32, byte| {
        (0..8).fold(sum ^ (u32::from(*byte) << (bits - 8)), |sum, _| {
            (if sum & top == 0 { sum << 1 } else { sum << 1 ^ polynomial }) & mask
        })
    })
}

/// A FLAC file at 16 kHz with one channel of 16 bits: blocks of samples as they are, and then blocks of silence in
/// eleven bytes each.
fn flac(blocks: &[Vec<i16>], silent: usize) -> Vec<u8> {
    const BLOCK: u16 = 4096;
    let mut file = b"fLaC\x80\0\0\x22".to_vec();
    file.extend(BLOCK.to_be_bytes());
    file.extend(BLOCK.to_be_bytes());
    file.extend([0; 6]);
    // 20 bits of the rate, 3 of the channels, 5 of the sample's size, and 36 of the unknown length.
    file.extend(((16_000u64 << 44) | (15 << 36)).to_be_bytes());
    file.extend([0; 16]);
    let mut frame = |number: u8, subframe: &[u8], size: u16| {
        let mut bytes = vec![0xff, 0xf8, 0x75, 0x08, number & 0x7f];
        bytes.extend((size - 1).to_be_bytes());
        bytes.push(crc(&bytes, 8, 0x07) as u8);
        bytes.extend(subframe);
        bytes.extend((crc(&bytes, 16, 0x8005) as u16).to_be_bytes());
        file.extend(bytes);
    };
    for (index, block) in blocks.iter().enumerate() {
        let samples = block.iter().flat_map(|sample| sample.to_be_bytes());
        let subframe: Vec<u8> = [0x02].into_iter().chain(samples).collect();
        frame(index as u8, &subframe, block.len() as u16);
    }
    (0..silent).for_each(|index| frame(index as u8, &[0, 0, 0], BLOCK));
    file
}

fn decode_with(data: &[u8], limit: usize) -> Result<Samples, MediaError> {
    let mut memory = Counted { limit: 1 << 30, ..Counted::default() };
    let decoded = decode_audio(data, &mut Budget { samples: limit, ..budget(&mut memory) });
    if let Ok(samples) = &decoded {
        assert_eq!(memory.taken, samples.len() * BYTES, "the canonical form stays taken");
    }
    decoded
}

fn decoded(data: &[u8]) -> Result<Samples, MediaError> {
    decode_with(data, 1 << 20)
}

fn noise(count: u32) -> Vec<i16> {
    (0..count).map(|n| (n.wrapping_mul(2_654_435_761) >> 17) as i16).collect()
}

#[test]
fn floats_at_16_khz_pass_to_the_bit() {
    let samples: Vec<f32> = noise(5000).iter().map(|sample| f32::from(*sample) / 12_345.0).collect();
    assert_eq!(decoded(&wav(3, 1, 16_000, 32, &floats(&samples))).unwrap(), samples);
}

#[test]
fn integers_are_parts_of_their_range_and_channels_are_mixed() {
    let expected: Vec<f32> = noise(3000).iter().map(|sample| f32::from(*sample) / 32_768.0).collect();
    assert_eq!(decoded(&wav(1, 1, 16_000, 16, &shorts(&noise(3000)))).unwrap(), expected);
    assert_eq!(decoded(&wav(1, 1, 16_000, 8, &[128, 192, 0])).unwrap(), [0.0, 0.5, -1.0]);
    assert_eq!(decoded(&wav(1, 1, 16_000, 24, &[0, 0, 0x40, 0, 0, 0x80])).unwrap(), [0.5, -1.0]);
    assert_eq!(decoded(&wav(3, 2, 16_000, 32, &floats(&[1.0, 0.5, -1.0, 0.0]))).unwrap(), [0.75, -0.5]);
}

#[test]
fn flac_gives_the_samples_that_it_was_made_of() {
    let blocks = [noise(4096), noise(4096)];
    let expected: Vec<f32> = blocks.concat().iter().map(|sample| f32::from(*sample) / 32_768.0).collect();
    assert_eq!(decoded(&flac(&blocks, 0)).unwrap(), expected);
}

#[test]
fn mp3_is_decoded_and_resampled() {
    let samples = decoded(&mp3(20)).unwrap();
    let expected = (20 * 1152 * 160_usize).div_ceil(441);
    assert!(samples.len().abs_diff(expected) <= 1152, "{} of {expected}", samples.len());
    assert!(samples.iter().all(|sample| sample.abs() < 1e-6));
    // A tag in front, with a picture in it that is not read.
    let mut tagged = b"ID3\x04\0\0\0\0\x07\x68".to_vec();
    tagged.extend(vec![0xff; 1000]);
    tagged.extend(mp3(20));
    assert_eq!(decoded(&tagged).unwrap().len(), samples.len());
}

#[test]
fn hours_in_few_bytes_stop_at_the_limit() {
    let silent = flac(&[], 20_000);
    assert!(silent.len() < 300_000, "{} bytes are 85 minutes", silent.len());
    assert_eq!(decode_with(&silent, 160_000), Err(MediaError::TooLong { seconds: 10 }));
    assert_eq!(decode_with(&mp3(2000), 160_000), Err(MediaError::TooLong { seconds: 10 }));
    // Memory is bounded by the limit, not by the length that a file claims.
    let mut memory = Counted { limit: 1 << 30, ..Counted::default() };
    decode_audio(&silent, &mut Budget { samples: 160_000, ..budget(&mut memory) }).unwrap_err();
    assert!(memory.most < WORK + silent.len() + 4 * 160_000 * BYTES, "{}", memory.most);
}

#[test]
fn samples_that_are_not_finite_are_refused() {
    for sample in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for rate in [16_000, 48_000] {
            let data = floats(&[0.0, 0.5, sample, 0.0]);
            assert_eq!(decoded(&wav(3, 1, rate, 32, &data)), Err(MediaError::NotFinite));
        }
    }
    let huge = f64::MAX.to_le_bytes();
    assert_eq!(decoded(&wav(3, 1, 16_000, 64, &huge)), Err(MediaError::NotFinite));
}

#[test]
fn odd_files_are_refused_by_name() {
    assert_eq!(decoded(b"OggS"), Err(MediaError::NoAudio));
    assert_eq!(decoded(&wav(1, 1, 16_000, 16, &[])), Err(MediaError::Silent));
    assert_eq!(decoded(&wav(1, 1, 44_101, 16, &[0; 64])), Err(MediaError::Rate(44_101)));
    // Compressed WAV files have no decoder here.
    assert!(matches!(decoded(&wav(0x55, 1, 16_000, 16, &[0; 64])), Err(MediaError::Damaged(_))));
}

#[test]
fn decoding_stops_at_the_deadline() {
    let mut memory = Counted { limit: 1 << 30, ..Counted::default() };
    let mut late = Budget { deadline: Instant::now() - Duration::from_secs(1), ..budget(&mut memory) };
    let file = wav(1, 1, 16_000, 16, &[0; 6400]);
    assert_eq!(decode_audio(&file, &mut late), Err(MediaError::TooSlow));
}

/// `symphonia-format-riff` 0.6.1 overflows on some headers of WAV files, which panics in builds with checks.
#[test]
fn no_panic_of_a_decoder_gets_out() {
    let files = [wav(1, 2, 44_100, 16, &shorts(&noise(400))), flac(&[noise(64)], 3), mp3(3)];
    let mut failed = 0;
    let mut check = |data: &[u8]| failed += usize::from(decoded(data) == Err(MediaError::Failed));
    for file in files {
        (0..file.len().min(900)).step_by(7).for_each(|end| check(&file[..end]));
        for at in (0..file.len().min(120)).step_by(3) {
            let mut changed = file.clone();
            for bits in [0x01, 0xff] {
                changed[at] = file[at] ^ bits;
                check(&changed);
            }
        }
    }
    // Few of the thousands of files do.
    assert!(failed < 100, "{failed} decoders failed");
}
