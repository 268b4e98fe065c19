//! Decodes media to the canonical forms that a model declares, in a bounded pool of their own: texts never wait for
//! media.
//!
//! Memory is taken before it is allocated, by caller ([`Bound`]). What decoding needs is given back when an item is
//! decoded; the canonical forms keep theirs until the request ends, because a request that is sent again needs them.

mod check;
mod fetch;
mod memory;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tutti_media::{Budget, MediaError, Memory, Pixels, SAMPLE_RATE, SizeLimits};
use tutti_proto::{
    cluster::v1::{self as pb, MediaKind},
    declaration::{
        ClipInput, MediaForm, MediaInput, PixelCount, PixelInput, SoundSentinels, encoder_calls, media_tokens,
    },
};
use tutti_runtime::Error;
use tutti_settings::RouterSettings;

pub use self::{check::check, memory::MediaLease};
use self::{
    check::input_of,
    fetch::{Fetcher, Fetches},
    memory::{MediaMemory, RETRY_AFTER},
};
use super::request::{Detail, Media};
use crate::{
    keys::Share,
    served::ServedModel,
    uploads::Upload,
    work_lane::{LaneSize, NotRun, WorkLane},
};

/// Quantum of the deficit round robin, in bytes of files per turn of a caller.
const QUANTUM_BYTES: u64 = 256 << 10;
/// Pixels of a picture of low detail.
const LOW_DETAIL_PIXELS: u64 = 512 * 512;
/// Bytes per pixel.
const CHANNELS: usize = 3;
/// Bytes per sample.
const SAMPLE_BYTES: usize = size_of::<f32>();
/// The threads that decode media, and the memory of media.
pub struct MediaPool {
    lane: WorkLane,
    memory: Arc<MediaMemory>,
    fetcher: Fetcher,
}

/// The files of a request, and the memory of the body that they came in.
pub struct Files {
    /// The files.
    pub media: Vec<Media>,
    /// The memory of the body. It is given back as soon as the files have memory here, because all bodies share it,
    /// also those of texts.
    pub upload: Option<Upload>,
}

/// A request's media in canonical forms, before their places in the prompt are known.
#[derive(Default)]
pub struct DecodedMedia {
    /// The items, without runs.
    pub items: Vec<DecodedItem>,
    /// The memory of the items. `None` if there are none.
    pub lease: Option<MediaLease>,
}

/// A media item in canonical form.
#[derive(Clone, Debug, PartialEq)]
pub struct DecodedItem {
    /// Path of the item in the request, for errors.
    pub path: String,
    /// The item, without runs.
    pub item: pb::MediaItem,
    /// Number of the item's tokens.
    pub tokens: u32,
    /// The placeholder token of its kind.
    pub placeholder: u32,
    /// The texts in front of the item's runs, such as `<0.5 seconds>`. Empty if the item is one run without a text.
    pub times: Vec<String>,
    /// The item's relation to another one.
    pub pairing: Pairing,
}

/// The relation of an item to the one next to it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Pairing {
    /// There is none.
    #[default]
    Alone,
    /// The item is a video, and the next item is its sound.
    Video(Turns),
    /// The item is the sound of the video before.
    Sound,
}

/// The way in which the tokens of a video take turns with those of its sound.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Turns {
    /// Sentinels around both.
    pub sentinels: SoundSentinels,
    /// Seconds from one patch of frames to the next, in the precision in which the order is computed.
    pub seconds_per_patch: f64,
    /// Positions per second. A token of sound is one position.
    pub positions_per_second: f64,
}

impl DecodedItem {
    /// Number of the item's placeholders in a client's prompt: one for each of its runs with a text, and none for the
    /// sound of a video.
    pub fn placeholders(&self) -> usize {
        match self.pairing {
            Pairing::Sound => 0,
            Pairing::Video(_) | Pairing::Alone => self.times.len().max(1),
        }
    }
}

/// Numbers of a request's media tokens, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MediaTokens {
    /// Tokens of recordings.
    pub audio: u32,
    /// Tokens of pictures.
    pub image: u32,
    /// Tokens of videos.
    pub video: u32,
}

impl MediaTokens {
    /// Counts the tokens of items.
    pub fn of<'a>(items: impl Iterator<Item = &'a pb::MediaItem>) -> Self {
        items.fold(Self::default(), |mut counts, item| {
            let tokens = item.tokens() as u32;
            match item.kind() {
                MediaKind::Audio => counts.audio += tokens,
                MediaKind::Image => counts.image += tokens,
                MediaKind::Video => counts.video += tokens,
                MediaKind::Unspecified => {}
            }
            counts
        })
    }
}

impl MediaPool {
    /// Creates the pool of these settings, whose threads yield to all that serves texts.
    pub fn new(settings: &RouterSettings) -> Result<Self, Error> {
        let size =
            LaneSize { threads: settings.media_threads, queue: settings.media_queue, quantum: QUANTUM_BYTES };
        let memory = MediaMemory::new(settings.max_media_memory as u64);
        let lane = WorkLane::in_background(size, "decode")?;
        Ok(Self { lane, memory, fetcher: Fetcher::default() })
    }

    /// Fetches and decodes items that [`check`] accepts. `copies` is the number of further copies of the canonical
    /// forms that the request will have.
    pub async fn decode(
        &self,
        files: Files,
        model: Arc<ServedModel>,
        limits: Arc<RouterSettings>,
        share: Share,
        copies: u32,
    ) -> Result<DecodedMedia, Error> {
        let Files { mut media, upload } = files;
        let Some(first) = media.first() else { return Ok(DecodedMedia::default()) };
        let mut lease = self.memory.lease(share);
        let bytes = media.iter().map(file_bytes).sum();
        if !lease.take(bytes) {
            return Err(lease.refused(&first.path, MediaError::NoMemory(bytes)));
        }
        drop(upload);
        let (max_bytes, timeout) = (limits.max_body_bytes, limits.media_fetch_timeout());
        self.fetcher.fetch(Fetches { media: &mut media, max_bytes, timeout }, &mut lease).await?;
        let bytes: usize = media.iter().map(file_bytes).sum();
        let span = tracing::Span::current();
        let decode = move || span.in_scope(|| decode_all(media, &model, &limits, lease, copies));
        self.lane.run(share, bytes as u64, decode).await.map_err(|error| match error {
            NotRun::Full { ahead, limit } => {
                let message = format!("media of {ahead} requests are decoded or wait, the limit is {limit}");
                Error::overloaded(message, RETRY_AFTER)
            }
            NotRun::Failed(error) => error,
        })?
    }
}

/// Decodes items on this thread with the default limits, for fuzzers.
#[cfg(feature = "fuzzing")]
pub fn decode_now(media: Vec<Media>, model: &ServedModel, copies: u32) -> Result<DecodedMedia, Error> {
    let settings = RouterSettings::default();
    let mut lease = MediaMemory::new(settings.max_media_memory as u64).lease(Share::default());
    lease.take(media.iter().map(file_bytes).sum());
    decode_all(media, model, &settings, lease, copies)
}

fn file_bytes(item: &Media) -> usize {
    item.data.iter().map(Vec::len).sum()
}

/// Seconds from one patch of frames to the next, as the reference computes them.
fn seconds_per_patch(pixels: &PixelInput, fps: f64) -> f64 {
    if fps > 0.0 { f64::from(pixels.temporal) / fps } else { f64::INFINITY }
}

/// The limits of one request's items.
struct Limits<'a> {
    settings: &'a RouterSettings,
    /// Maximum number of tokens of a prompt.
    tokens: usize,
    /// Bytes of canonical forms that are left to the request.
    left: usize,
    /// Time at which the decoding of all items stops.
    deadline: Instant,
}

/// Maximum time for all items of a request, in times of one. Usual items take a small part of theirs.
const SLOW_ITEMS: u32 = 4;

fn decode_all(
    media: Vec<Media>,
    model: &ServedModel,
    settings: &RouterSettings,
    mut lease: MediaLease,
    copies: u32,
) -> Result<DecodedMedia, Error> {
    let inputs = model.media_inputs();
    let tokens = model.max_model_len() as usize;
    let timeout = Duration::from_millis(settings.media_timeout_ms.into());
    let deadline = Instant::now() + timeout.saturating_mul(SLOW_ITEMS);
    let mut limits = Limits { settings, tokens, left: settings.max_media_bytes, deadline };
    let mut decoded = Vec::with_capacity(media.len());
    let mut items = Vec::with_capacity(media.len());
    let have_sound: Vec<bool> = media.iter().skip(1).map(|item| item.is_sound_of_video).collect();
    for (index, item) in media.into_iter().enumerate() {
        let input = input_of(&item, &inputs)?;
        let is_sound_of_video = item.is_sound_of_video;
        let (path, fps) = (item.path.clone(), item.fps.unwrap_or(1.0));
        let (frames, bytes) = (item.data.len(), file_bytes(&item));
        let done =
            decode_item(item, input, &limits, &mut lease).map_err(|error| lease.refused(&path, error))?;
        lease.give(bytes);
        limits.left = limits.left.saturating_sub(done.data.len());
        let times = match input.form {
            MediaForm::Pixels(pixels) if input.kind == MediaKind::Video && pixels.timestamps.is_some() => {
                times(frames, pixels.temporal as usize, fps)
            }
            _ => Vec::new(),
        };
        let pairing = match input.form {
            MediaForm::Pixels(pixels @ PixelInput { sound: Some(sentinels), .. })
                if have_sound.get(index) == Some(&true) =>
            {
                Pairing::Video(Turns {
                    sentinels,
                    seconds_per_patch: seconds_per_patch(&pixels, fps),
                    positions_per_second: pixels.positions_per_second.into(),
                })
            }
            _ if is_sound_of_video => Pairing::Sound,
            _ => Pairing::Alone,
        };
        decoded.push((path, input.placeholder, times, pairing));
        items.push(done);
    }
    // The message of each choice has a copy of the canonical forms.
    let bytes = items.iter().map(|item| item.data.len()).sum::<usize>().saturating_mul(copies as usize);
    if !lease.take(bytes) {
        let path = decoded.first().map_or("n", |(path, ..)| path);
        return Err(lease.refused(path, MediaError::NoMemory(bytes)));
    }
    let counts = media_tokens(&inputs, &items).map_err(|error| {
        let path = &decoded[error.item].0;
        Error::invalid(format!("{path}.{}", error.field), error.problem)
    })?;
    let kinds = items.iter().zip(&counts).map(|(item, tokens)| (item.kind(), *tokens as usize));
    encoder_calls(&inputs, kinds)
        .map_err(|error| Error::invalid(&decoded[error.item()].0, error.to_string()))?;
    let of_item = |((path, placeholder, times, pairing), (item, tokens))| DecodedItem {
        path,
        item,
        tokens,
        placeholder,
        times,
        pairing,
    };
    let items = decoded.into_iter().zip(items.into_iter().zip(counts)).map(of_item).collect();
    Ok(DecodedMedia { items, lease: Some(lease) })
}

/// Decodes an item to its canonical form, without tokens.
fn decode_item(
    item: Media,
    input: &MediaInput,
    limits: &Limits<'_>,
    lease: &mut MediaLease,
) -> Result<pb::MediaItem, MediaError> {
    let Media { kind, format, mut data, fps, detail, .. } = item;
    let empty = pb::MediaItem { kind: kind.into(), ..pb::MediaItem::default() };
    let timeout = Duration::from_millis(limits.settings.media_timeout_ms.into());
    let mut budget = Budget {
        memory: lease,
        pixels: limits.settings.max_media_pixels as u64,
        samples: 0,
        deadline: limits.deadline.min(Instant::now() + timeout),
    };
    match input.form {
        MediaForm::Bytes { .. } => {
            let data = data.pop().unwrap_or_default();
            if data.len() > limits.left {
                return Err(MediaError::TooLarge { bytes: data.len(), left: limits.left });
            }
            if !budget.memory.take(data.len()) {
                return Err(MediaError::NoMemory(data.len()));
            }
            Ok(pb::MediaItem { format, data: data.into(), ..empty })
        }
        MediaForm::Clips(clips) => {
            budget.samples = max_samples(&clips, limits, input.max_call_tokens);
            if clips.rate != SAMPLE_RATE {
                return Err(MediaError::Rate(clips.rate));
            }
            let file = data.first().map_or(&[][..], Vec::as_slice);
            let left = limits.left / SAMPLE_BYTES;
            let samples = tutti_media::decode_audio(file, &mut budget).map_err(|error| match error {
                // The bytes that are left are the reason, and not the model's limit.
                MediaError::TooLong { .. } if budget.samples == left => {
                    MediaError::TooLarge { bytes: (left + 1) * SAMPLE_BYTES, left: limits.left }
                }
                error => error,
            })?;
            let bytes = samples.len() * SAMPLE_BYTES;
            if !budget.memory.take(bytes) {
                return Err(MediaError::NoMemory(bytes));
            }
            let mut data = Vec::with_capacity(bytes);
            samples.iter().for_each(|sample| data.extend_from_slice(&sample.to_le_bytes()));
            drop(samples);
            budget.memory.give(bytes);
            Ok(pb::MediaItem { data: data.into(), ..empty })
        }
        MediaForm::Pixels(pixels) => {
            let count = data.len();
            let size = |own: Pixels| {
                let size = size(&pixels, input.max_call_tokens, detail, count, own)?;
                let bytes = [count, size[0], size[1], CHANNELS].into_iter().fold(1, usize::saturating_mul);
                match bytes <= limits.left {
                    true => Ok(size),
                    false => Err(MediaError::TooLarge { bytes, left: limits.left }),
                }
            };
            if kind == MediaKind::Video {
                let files: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
                let frames = tutti_media::decode_frames(&files, &mut budget, size)?;
                let patches = frames.count.div_ceil(pixels.temporal.max(1) as usize);
                return Ok(pb::MediaItem {
                    grid: Some(grid(&pixels, patches, frames.size)),
                    seconds_per_grid: Some(seconds_per_patch(&pixels, fps.unwrap_or(1.0)) as f32),
                    data: frames.pixels.into(),
                    ..empty
                });
            }
            let file = data.first().map_or(&[][..], Vec::as_slice);
            let picture = tutti_media::decode_picture(file, &mut budget, size)?;
            Ok(pb::MediaItem {
                grid: Some(grid(&pixels, 1, picture.size)),
                data: picture.pixels.into(),
                ..empty
            })
        }
    }
}

/// The number of samples after which a recording has more tokens than a prompt or a call of the encoder, or more bytes
/// than are left.
fn max_samples(clips: &ClipInput, limits: &Limits<'_>, max_call_tokens: Option<u32>) -> usize {
    let chunk = clips.tokens_of_frames(clips.chunk as usize).max(1);
    let tokens = max_call_tokens.map_or(limits.tokens, |most| limits.tokens.min(most as usize));
    let chunks = tokens / chunk + 1;
    chunks
        .saturating_mul(clips.chunk as usize)
        .saturating_mul(clips.hop as usize)
        .min(limits.left / SAMPLE_BYTES)
}

/// The size to which pictures or frames are resized.
fn size(
    pixels: &PixelInput,
    max_call_tokens: Option<u32>,
    detail: Detail,
    frames: usize,
    own: Pixels,
) -> Result<Pixels, MediaError> {
    let least = pixels.shortest_edge;
    // An encoder may take less than the checkpoint's files say.
    let token = u64::from(pixels.patch * pixels.merge).pow(2);
    let of_encoder = max_call_tokens.map_or(u64::MAX, |tokens| u64::from(tokens).saturating_mul(token));
    let most = pixels.longest_edge.min(of_encoder.max(least));
    let most = match detail {
        Detail::Full => most,
        Detail::Low => most.min(LOW_DETAIL_PIXELS.max(least)),
    };
    let [least, most] = [least, most].map(|edge| usize::try_from(edge).unwrap_or(usize::MAX));
    let sizes = SizeLimits { factor: (pixels.patch * pixels.merge) as usize, least, most };
    Ok(match pixels.counted {
        PixelCount::PerFrame => sizes.size(own)?,
        PixelCount::AllFrames => sizes.video_size(frames, pixels.temporal as usize, own)?,
    })
}

fn grid(pixels: &PixelInput, patches: usize, [height, width]: Pixels) -> pb::MediaGrid {
    let [height, width] = [height, width].map(|side| (side / pixels.patch.max(1) as usize) as u32);
    pb::MediaGrid { frames: patches as u32, height, width }
}

/// The texts in front of the patches of `frames` frames: the mean of the times of a patch's first and last frame.
fn times(frames: usize, per_patch: usize, fps: f64) -> Vec<String> {
    let per_patch = per_patch.max(1);
    let time = |frame: usize| frame.min(frames.saturating_sub(1)) as f64 / fps;
    let of_patch = |first: usize| {
        let seconds = (time(first) + time(first + per_patch - 1)) / 2.0;
        format!("<{seconds:.1} seconds>")
    };
    (0..frames).step_by(per_patch).map(of_patch).collect()
}

#[cfg(test)]
mod tests;
