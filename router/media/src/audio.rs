//! Recordings: WAV, MP3 and FLAC become samples of one channel at one rate.

use std::io::{Cursor, Read, Seek, SeekFrom};

use symphonia::{
    core::{
        codecs::audio::{AudioDecoder, AudioDecoderOptions},
        errors::Error,
        formats::{FormatOptions, FormatReader, TrackType},
        io::{MediaSource, MediaSourceStream},
    },
    default::{
        codecs::{FlacDecoder, MpaDecoder, PcmDecoder},
        formats::{FlacReader, MpaReader, WavReader},
    },
};

use crate::{Budget, MediaError, guarded, resample::Resampler};

/// Samples per second of the canonical form.
pub const SAMPLE_RATE: u32 = 16_000;
/// Memory in bytes for a decoder's tables, a filter's weights and a packet's samples.
const WORK: usize = 16 << 20;
/// Samples for which memory is taken at a time.
const PIECE: usize = 1 << 16;
/// Bytes per sample.
const BYTES: usize = size_of::<f32>();
/// Maximum number of channels.
const MAX_CHANNELS: usize = 32;
/// Maximum number of packets of an MP3 that cannot be decoded. The first ones of a cut recording refer to others.
const MAX_BROKEN: usize = 8;

/// Samples in canonical form: one channel at [`SAMPLE_RATE`], each finite.
pub type Samples = Vec<f32>;

/// Decodes a recording. Channels are mixed by their mean.
pub fn decode_audio(data: &[u8], budget: &mut Budget<'_>) -> Result<Samples, MediaError> {
    guarded(|| budget.holding(WORK, |budget| decode(data, budget)))
}

/// The bytes of a file, whose reading stops at the deadline.
struct Source {
    bytes: Cursor<Box<[u8]>>,
    deadline: std::time::Instant,
}

impl Read for Source {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if std::time::Instant::now() >= self.deadline {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        self.bytes.read(buffer)
    }
}

impl Seek for Source {
    fn seek(&mut self, to: SeekFrom) -> std::io::Result<u64> {
        self.bytes.seek(to)
    }
}

impl MediaSource for Source {
    fn is_seekable(&self) -> bool {
        true
    }

    fn byte_len(&self) -> Option<u64> {
        Some(self.bytes.get_ref().len() as u64)
    }
}

fn damaged(error: &Error) -> MediaError {
    MediaError::Damaged(error.to_string())
}

/// A file's packets, and their decoder.
struct Opened {
    packets: Box<dyn FormatReader>,
    decoder: Box<dyn AudioDecoder>,
    track: u32,
    /// Number of packets that may be damaged.
    may_break: usize,
}

impl Opened {
    fn open(data: &[u8], deadline: std::time::Instant) -> Result<Self, MediaError> {
        /// The formats, by their first bytes.
        enum Format {
            Wav,
            Flac,
            Mp3,
        }
        let format = match data {
            [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'A', b'V', b'E', ..] => Format::Wav,
            [b'f', b'L', b'a', b'C', ..] => Format::Flac,
            [b'I', b'D', b'3', ..] => Format::Mp3,
            // Eleven bits of synchronisation, and the layer that is written as 01.
            [0xff, second, ..] if second & 0xe6 == 0xe2 => Format::Mp3,
            _ => return Err(MediaError::NoAudio),
        };
        let data = match format {
            Format::Mp3 => without_id3(data).into(),
            Format::Flac => {
                without_metadata(data).ok_or_else(|| MediaError::Damaged(NO_STREAMINFO.into()))?
            }
            Format::Wav => data.into(),
        };
        let source = Source { bytes: Cursor::new(data), deadline };
        let stream = MediaSourceStream::new(Box::new(source), Default::default());
        let options = FormatOptions::default();
        let packets: Box<dyn FormatReader> = match format {
            Format::Wav => Box::new(WavReader::try_new(stream, options).map_err(|e| damaged(&e))?),
            Format::Flac => Box::new(FlacReader::try_new(stream, options).map_err(|e| damaged(&e))?),
            Format::Mp3 => Box::new(MpaReader::try_new(stream, options).map_err(|e| damaged(&e))?),
        };
        let unknown = || MediaError::Damaged("it has no sound of a known kind".to_owned());
        let track = packets.default_track(TrackType::Audio).ok_or_else(unknown)?;
        let parameters = track.codec_params.as_ref().and_then(|known| known.audio()).ok_or_else(unknown)?;
        let options = AudioDecoderOptions::default();
        let decoder: Box<dyn AudioDecoder> = match format {
            Format::Wav => Box::new(PcmDecoder::try_new(parameters, &options).map_err(|e| damaged(&e))?),
            Format::Flac => Box::new(FlacDecoder::try_new(parameters, &options).map_err(|e| damaged(&e))?),
            Format::Mp3 => Box::new(MpaDecoder::try_new(parameters, &options).map_err(|e| damaged(&e))?),
        };
        let may_break = if matches!(format, Format::Mp3) { MAX_BROKEN } else { 0 };
        let track = track.id;
        Ok(Self { packets, decoder, track, may_break })
    }
}

/// The part of an MP3 behind a tag of ID3, whose pictures and texts are not read.
fn without_id3(data: &[u8]) -> &[u8] {
    /// Bytes of the header of a tag, and of its copy at the end.
    const HEADER: usize = 10;
    let [b'I', b'D', b'3', _, _, flags, a, b, c, d, ..] = data else { return data };
    // Each byte of the size has seven bits.
    let size = [a, b, c, d].iter().fold(0, |size, byte| size << 7 | usize::from(**byte & 0x7f));
    let footer = if flags & 0x10 == 0 { 0 } else { HEADER };
    data.get(HEADER + size + footer..).unwrap_or(&[])
}

/// The reason why a FLAC cannot be decoded that does not describe its samples.
const NO_STREAMINFO: &str = "it does not begin with a block that describes its samples";

/// A FLAC without its pictures, texts and tables of positions, which the reader would copy and sort: the block of
/// stream information as the only one, and the frames. `None` if there is no such block.
fn without_metadata(data: &[u8]) -> Option<Box<[u8]>> {
    /// The bytes in front of the first block.
    const MARK: usize = 4;
    /// Bytes of a block's header: one bit for the last block, seven for the type, and the length.
    const HEADER: usize = 4;
    /// Bytes of the block of stream information, whose type is 0.
    const STREAMINFO: usize = 34;
    let block = |at: usize| {
        let [first, a, b, c] = *data.get(at..at.checked_add(HEADER)?)?.first_chunk()?;
        let length = u32::from_be_bytes([0, a, b, c]) as usize;
        Some((first & 0x80 != 0, first & 0x7f, at + HEADER..at + HEADER + length))
    };
    let (mut is_last, kind, range) = block(MARK)?;
    let information = data.get(range.clone()).filter(|bytes| kind == 0 && bytes.len() == STREAMINFO)?;
    let mut end = range.end;
    while !is_last {
        let (last, _, range) = block(end)?;
        (is_last, end) = (last, range.end);
    }
    let header = [0x80, 0, 0, STREAMINFO as u8];
    Some([&data[..MARK], &header, information, data.get(end..)?].concat().into())
}

fn decode(data: &[u8], budget: &mut Budget<'_>) -> Result<Samples, MediaError> {
    // The reader keeps a copy.
    budget.take(data.len())?;
    let decoded = decode_packets(data, budget);
    budget.memory.give(data.len());
    decoded
}

fn decode_packets(data: &[u8], budget: &mut Budget<'_>) -> Result<Samples, MediaError> {
    let late = |error: Error, budget: &Budget<'_>| {
        if budget.is_late() { MediaError::TooSlow } else { damaged(&error) }
    };
    let opened = Opened::open(data, budget.deadline);
    // Readers take the end of the time for the end of the file.
    budget.check_time()?;
    let mut opened = opened?;
    let mut resampler: Option<(u32, Resampler)> = None;
    let (mut mixed, mut interleaved, mut samples) = (Vec::new(), Vec::new(), Room::default());
    loop {
        budget.check_time()?;
        let packet = match opened.packets.next_packet() {
            Ok(Some(packet)) if packet.track_id == opened.track => packet,
            Ok(Some(_)) => continue,
            Ok(None) => break,
            // A recording that is cut ends in the middle of a packet.
            Err(Error::IoError(error)) if error.kind() == std::io::ErrorKind::UnexpectedEof => break,
            Err(error) => return Err(late(error, budget)),
        };
        let sound = match opened.decoder.decode(&packet) {
            Ok(sound) => sound,
            Err(Error::DecodeError(_)) if opened.may_break > 0 => {
                opened.may_break -= 1;
                continue;
            }
            Err(error) => return Err(late(error, budget)),
        };
        let (rate, channels) = (sound.spec().rate(), sound.spec().channels().count());
        if !(1..=MAX_CHANNELS).contains(&channels) {
            return Err(MediaError::Damaged(format!("it has {channels} channels")));
        }
        sound.copy_to_vec_interleaved::<f32>(&mut interleaved);
        if resampler.is_none() {
            let new = Resampler::new(rate, SAMPLE_RATE).ok_or(MediaError::Rate(rate))?;
            resampler = Some((rate, new));
        }
        let Some((first, resampler)) = &mut resampler else { return Err(MediaError::Failed) };
        if *first != rate {
            return Err(MediaError::Damaged(format!("its rate changes from {first} to {rate}")));
        }
        mix(&interleaved, channels, &mut mixed)?;
        let more = resampler.outputs(mixed.len() as u64) as usize + 1;
        samples.grow(more, budget)?;
        resampler.push(&mixed, &mut samples.samples);
        samples.check(budget)?;
    }
    if let Some((_, resampler)) = resampler {
        // The filter holds back less than a piece.
        samples.grow(PIECE, budget)?;
        resampler.finish(&mut samples.samples);
        samples.check(budget)?;
    }
    samples.finish(budget)
}

/// Mixes channels by their mean. Refuses samples that are not finite.
fn mix(interleaved: &[f32], channels: usize, mixed: &mut Vec<f32>) -> Result<(), MediaError> {
    mixed.clear();
    if channels == 1 {
        mixed.extend_from_slice(interleaved);
    } else {
        let of_frame = |frame: &[f32]| {
            let sum: f64 = frame.iter().copied().map(f64::from).sum();
            (sum / channels as f64) as f32
        };
        mixed.extend(interleaved.chunks_exact(channels).map(of_frame));
    }
    if mixed.iter().all(|sample| sample.is_finite()) { Ok(()) } else { Err(MediaError::NotFinite) }
}

/// Samples, and the room for them that is taken from the budget.
#[derive(Default)]
struct Room {
    samples: Samples,
    /// Samples for which memory is taken.
    taken: usize,
}

impl Room {
    /// Makes room for further samples. A vector that grows has its samples twice.
    fn grow(&mut self, more: usize, budget: &mut Budget<'_>) -> Result<(), MediaError> {
        let needed = self.samples.len() + more;
        if needed <= self.taken {
            return Ok(());
        }
        let room = needed.max(self.taken * 2).max(PIECE);
        budget.take(room * BYTES)?;
        self.samples.reserve_exact(room - self.samples.len());
        budget.memory.give(self.taken * BYTES);
        self.taken = room;
        Ok(())
    }

    fn check(&self, budget: &Budget<'_>) -> Result<(), MediaError> {
        if self.samples.len() > budget.samples {
            return Err(MediaError::TooLong { seconds: budget.samples as u64 / u64::from(SAMPLE_RATE) });
        }
        match self.samples.iter().rev().take(PIECE).all(|sample| sample.is_finite()) {
            true => Ok(()),
            false => Err(MediaError::NotFinite),
        }
    }

    fn finish(mut self, budget: &mut Budget<'_>) -> Result<Samples, MediaError> {
        if self.samples.is_empty() {
            return Err(MediaError::Silent);
        }
        self.samples.shrink_to_fit();
        budget.memory.give((self.taken - self.samples.len()) * BYTES);
        Ok(self.samples)
    }
}

#[cfg(test)]
mod tests;
