//! The encoders of the families that take pictures, frames and sound: what a checkpoint declares, and the way from the
//! canonical form of media through features to rows of tokens.

use tutti_kernels::{Device, DeviceError, Encoder};
use tutti_proto::{
    cluster::v1::MediaKind,
    declaration::{
        ClipInput, MediaForm, MediaInput, PixelCount, PixelInput, SoundSentinels, Timestamps, WalkId,
    },
};

use crate::{
    DecoderDevice, EncoderItem, LoadError, LoadOptions,
    architecture::Checkpoint,
    audio::{self, AudioConfig, AudioEncoder, MelFilters},
    config::{
        keys::{Key, Keys},
        ranges,
        text::TextConfig,
    },
    preprocessing::{PixelPreparation, PreprocessorFiles},
    thinker::{AUDIO_ENCODER, DeclaredEncoder, HeldNodes, VISION_ENCODER},
    vision::{Channel, PatchGrid, PatchSizes, VisionConfig, VisionEncoder, VisionNames, patches},
    with_encoders::{EncoderSet, MediaEncoder},
};

/// The most tokens of a call of an encoder. It bounds the buffers, and the time for which a call stops all other work
/// of its worker: attention over a picture is quadratic.
const MAX_CALL_TOKENS: usize = 4096;

/// A family's rules of media.
#[derive(Debug, PartialEq)]
pub(crate) struct EncoderRules {
    pub vision: &'static VisionNames,
    pub videos: VideoRule,
    /// True if the vision encoder may give features for the thinker's first layers (*deepstack*).
    pub features: bool,
}

/// The form of a video in a family's prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VideoRule {
    /// One run of tokens, whose positions follow the time. The limit of pixels is that of a frame.
    Timed,
    /// A run of tokens per patch of frames, behind the text of its time. The limit of pixels is that of the whole
    /// video.
    Stamped,
}

/// The checked encoders of a checkpoint.
pub(crate) struct Encoders {
    vision: Option<Vision>,
    audio: Option<Audio>,
    /// The most tokens of a call.
    call_tokens: usize,
}

struct Vision {
    config: VisionConfig,
    names: &'static VisionNames,
    images: PixelPreparation,
    videos: PixelPreparation,
    rule: VideoRule,
    image_token: u32,
    video_token: u32,
    /// Tokens around an image or a patch of frames.
    sentinels: [u32; 2],
    /// Positions per second of a video.
    per_second: f32,
    /// Tokens around a video and its sound.
    sound: Option<SoundSentinels>,
}

struct Audio {
    config: AudioConfig,
    token: u32,
}

impl Encoders {
    /// Reads the encoders of a checkpoint. `top` holds their objects. `None` if the checkpoint has no encoder or no
    /// file that says how media are prepared, or if the device has no operations of encoders: the model then takes text
    /// alone. A worker that is to hold an encoder by name is refused instead.
    pub fn read<D: Encoder>(
        checkpoint: Checkpoint<'_>,
        top: &Keys<'_>,
        text: &TextConfig,
        rules: &EncoderRules,
        device: &D,
    ) -> Result<Option<Self>, LoadError> {
        let Checkpoint { file, options } = checkpoint;
        let dir = &options.dir;
        let (vision, sound) = (top.section(ranges::VISION_CONFIG)?, top.section(ranges::AUDIO_CONFIG)?);
        if vision.is_missing() && sound.is_missing() {
            return Ok(None);
        }
        let held = HeldNodes::of(options.nodes.as_deref());
        let asked = [VISION_ENCODER, AUDIO_ENCODER].into_iter().find(|node| held.names(node));
        let files = PreprocessorFiles::read(dir)?;
        let problem = match &files {
            None => format!("there is no {}", PreprocessorFiles::NAME),
            Some(_) if !D::IMPLEMENTED => {
                format!("the device has no operations of encoders: {}", device.describe())
            }
            Some(_) => String::new(),
        };
        let Some(files) = files.filter(|_| problem.is_empty()) else {
            if let Some(node) = asked {
                return Err(file.invalid(format!("node {node} cannot be loaded: {problem}")));
            }
            tracing::warn!(config = %file.path().display(), %problem, "the model takes text alone");
            return Ok(None);
        };
        let (hidden, dtype) = (text.hidden_size, text.dtype);
        let token = |keys: &Keys<'_>, key: &Key<u32>| {
            let id = keys.need(key)?;
            match (id as usize) < text.vocab_size {
                true => Ok(id),
                false => {
                    let problem = format!("{id} is not below vocab_size, {}", text.vocab_size);
                    Err(keys.invalid(key, problem))
                }
            }
        };
        let vision = match vision.is_missing() {
            true => None,
            false => {
                let config = VisionConfig::read(&vision, rules.features, hidden, dtype)?;
                let per_second = match rules.videos {
                    // Classes of the reference have different defaults, so a config must say it.
                    VideoRule::Timed => top.need(&ranges::POSITION_ID_PER_SECONDS)? as f32,
                    VideoRule::Stamped => 0.0,
                };
                // Sound takes turns with frames by time, so frames must have one.
                let has_sound = rules.videos == VideoRule::Timed && !sound.is_missing();
                let optional = |key| {
                    let is_there = has_sound && top.get(key)?.is_some();
                    is_there.then(|| token(top, key)).transpose()
                };
                let of_sound =
                    [optional(&ranges::AUDIO_START_TOKEN_ID)?, optional(&ranges::AUDIO_END_TOKEN_ID)?];
                let of_sound = match of_sound {
                    [Some(begin), Some(end)] => Some(SoundSentinels { begin, end }),
                    _ => None,
                };
                let (images, videos) = (files.images(dir, &config)?, files.videos(dir, &config)?);
                if images.channels != videos.channels {
                    let problem = "image_mean and image_std of images and of videos must be equal";
                    return Err(file.invalid(problem));
                }
                Some(Vision {
                    names: rules.vision,
                    images,
                    videos,
                    rule: rules.videos,
                    image_token: token(top, &ranges::IMAGE_TOKEN_ID)?,
                    video_token: token(top, &ranges::VIDEO_TOKEN_ID)?,
                    sentinels: [
                        token(top, &ranges::VISION_START_TOKEN_ID)?,
                        token(top, &ranges::VISION_END_TOKEN_ID)?,
                    ],
                    per_second,
                    sound: of_sound,
                    config,
                })
            }
        };
        let audio = match sound.is_missing() {
            true => None,
            false => {
                let config = AudioConfig::read(&sound, hidden, dtype)?;
                files.check_sound(dir, &config)?;
                Some(Audio { config, token: token(top, &ranges::AUDIO_TOKEN_ID)? })
            }
        };
        let call_tokens = MAX_CALL_TOKENS.min(text.max_context);
        Ok(Some(Self { vision, audio, call_tokens }))
    }
}

impl Vision {
    fn input(&self, kind: MediaKind, call_tokens: usize) -> MediaInput {
        let VisionConfig { patch, merge, temporal, .. } = self.config;
        let is_video = kind == MediaKind::Video;
        let PixelPreparation { limits, .. } = if is_video { &self.videos } else { &self.images };
        let is_stamped = is_video && self.rule == VideoRule::Stamped;
        let [begin, end] = self.sentinels;
        let pixels = PixelInput {
            patch: patch as u32,
            merge: merge as u32,
            temporal: temporal as u32,
            shortest_edge: limits.shortest_edge,
            longest_edge: limits.longest_edge,
            counted: if is_stamped { PixelCount::AllFrames } else { PixelCount::PerFrame },
            positions_per_second: if is_video { self.per_second } else { 0.0 },
            timestamps: is_stamped.then_some(Timestamps { begin, end }),
            sound: self.sound.filter(|_| is_video),
        };
        MediaInput {
            kind,
            walk: WalkId(0),
            placeholder: if is_video { self.video_token } else { self.image_token },
            form: MediaForm::Pixels(pixels),
            width: self.config.row_width() as u32,
            formats: Vec::new(),
            encoded_together: false,
            max_call_tokens: Some(call_tokens as u32),
        }
    }
}

impl Audio {
    fn input(&self, call_tokens: usize) -> MediaInput {
        MediaInput {
            kind: MediaKind::Audio,
            walk: WalkId(0),
            placeholder: self.token,
            form: MediaForm::Clips(CLIPS),
            width: self.config.out as u32,
            formats: Vec::new(),
            encoded_together: true,
            max_call_tokens: Some(call_tokens as u32),
        }
    }
}

/// The sound that audio encoders of this build take.
const CLIPS: ClipInput = ClipInput {
    rate: audio::RATE,
    hop: audio::HOP as u32,
    chunk: audio::CHUNK as u32,
    halvings: audio::HALVINGS,
    shortest: audio::SHORTEST as u32,
};

impl EncoderSet for Encoders {
    fn declared(&self) -> Vec<DeclaredEncoder> {
        let sound = self.audio.iter().map(|audio| DeclaredEncoder {
            node: AUDIO_ENCODER,
            inputs: vec![audio.input(self.call_tokens)],
        });
        let vision = self.vision.iter().map(|vision| DeclaredEncoder {
            node: VISION_ENCODER,
            inputs: [MediaKind::Image, MediaKind::Video]
                .map(|kind| vision.input(kind, self.call_tokens))
                .to_vec(),
        });
        sound.chain(vision).collect()
    }

    fn load<D: DecoderDevice>(
        &self,
        node: &'static str,
        options: &LoadOptions,
        device: &mut D,
    ) -> Result<Box<dyn MediaEncoder<D>>, LoadError> {
        let tokens = self.call_tokens;
        match (&self.vision, &self.audio) {
            (Some(vision), _) if node == VISION_ENCODER => Ok(Box::new(PixelEncoder {
                encoder: VisionEncoder::load(vision.config.clone(), vision.names, options, tokens, device)?,
                sizes: vision.config.patch_sizes(),
                channels: vision.images.channels,
            })),
            (_, Some(audio)) if node == AUDIO_ENCODER => Ok(Box::new(ClipEncoder {
                encoder: AudioEncoder::load(audio.config.clone(), options, tokens, device)?,
                filters: MelFilters::new(audio.config.bins),
            })),
            _ => Err(DeviceError::Misuse(format!("{node} is no encoder of this model")).into()),
        }
    }
}

/// A vision encoder behind the patches that it takes.
struct PixelEncoder<D: Device> {
    encoder: VisionEncoder<D>,
    sizes: PatchSizes,
    channels: [Channel; 3],
}

impl<D: DecoderDevice> MediaEncoder<D> for PixelEncoder<D> {
    fn weight_bytes(&self) -> u64 {
        self.encoder.weight_bytes()
    }

    fn run(
        &mut self,
        device: &mut D,
        items: &[EncoderItem<'_>],
        shape: Option<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        let PatchSizes { patch, .. } = self.sizes;
        let (mut values, mut grids) = (Vec::new(), Vec::new());
        for EncoderItem { data, grid } in items {
            let wrong = || DeviceError::Misuse(format!("{} bytes are no frames of {grid:?}", data.len()));
            let grid = grid.ok_or_else(wrong)?;
            let sides = [grid.height, grid.width].map(|side| side as usize * patch);
            let bytes = sides[0].saturating_mul(sides[1]).saturating_mul(3);
            if bytes == 0 || !data.len().is_multiple_of(bytes) {
                return Err(wrong());
            }
            let frames: Vec<&[u8]> = data.chunks_exact(bytes).collect();
            let (of_item, found) = patches(&frames, sides, self.sizes, self.channels).ok_or_else(wrong)?;
            let declared = PatchGrid {
                frames: grid.frames as usize,
                height: grid.height as usize,
                width: grid.width as usize,
            };
            if found != declared {
                return Err(wrong());
            }
            values.extend(of_item);
            grids.push(found);
        }
        self.encoder.run(device, &values, &grids, shape, out)
    }
}

/// An audio encoder behind the log-mel frames that it takes.
struct ClipEncoder<D: Device> {
    encoder: AudioEncoder<D>,
    filters: MelFilters,
}

impl<D: DecoderDevice> MediaEncoder<D> for ClipEncoder<D> {
    fn weight_bytes(&self) -> u64 {
        self.encoder.weight_bytes()
    }

    fn run(
        &mut self,
        device: &mut D,
        items: &[EncoderItem<'_>],
        shape: Option<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        let samples = |item: &EncoderItem<'_>| -> Vec<f32> {
            item.data.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
        };
        let clips: Vec<Vec<f32>> = items.iter().map(samples).collect();
        if !clips.iter().flatten().all(|sample| sample.is_finite()) {
            return Err(DeviceError::NotFinite("samples of sound are no numbers".into()));
        }
        let views: Vec<&[f32]> = clips.iter().map(Vec::as_slice).collect();
        let frames = self.filters.frames(&views);
        let frames = frames.ok_or_else(|| DeviceError::Misuse("sound without a window of samples".into()))?;
        self.encoder.run(device, &frames, shape, out)
    }
}

#[cfg(test)]
mod tests;
