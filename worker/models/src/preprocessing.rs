//! The files that say how media become the inputs of encoders: `preprocessor_config.json`, `processor_config.json` and
//! `video_preprocessor_config.json`.
//!
//! The router resizes and resamples, so sizes and rates travel in the declaration. Means and deviations stay with the
//! encoder. Values that would need another computation than this build has are refused by key.

use std::path::Path;

use tutti_runtime::gguf;

use crate::{
    LoadError,
    audio::AudioConfig,
    config::{
        ConfigFile,
        keys::{Key, Keys},
        ranges::{self, *},
    },
    vision::{Channel, VisionConfig},
};

/// The files of a checkpoint.
pub(crate) struct PreprocessorFiles {
    /// `preprocessor_config.json`.
    plain: Option<ConfigFile>,
    /// `processor_config.json`, with an object per kind of media.
    joint: Option<ConfigFile>,
    /// `video_preprocessor_config.json`.
    video: Option<ConfigFile>,
}

/// Limits of the size of resized images or videos, in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PixelLimits {
    pub shortest_edge: u64,
    pub longest_edge: u64,
}

/// The preparation of images or of videos.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PixelPreparation {
    pub limits: PixelLimits,
    pub channels: [Channel; 3],
}

impl PreprocessorFiles {
    /// Name of the file that published checkpoints have.
    pub const NAME: &str = "preprocessor_config.json";

    /// Reads the files in `dir`. `None` if there are none, as in a checkpoint of a text model.
    pub fn read(dir: &Path) -> Result<Option<Self>, LoadError> {
        if gguf::is_file(dir) {
            return Ok(None);
        }
        let files = Self {
            plain: ConfigFile::optional(dir, Self::NAME)?,
            joint: ConfigFile::optional(dir, "processor_config.json")?,
            video: ConfigFile::optional(dir, "video_preprocessor_config.json")?,
        };
        let holds = |name: &str| -> Result<bool, LoadError> {
            let section = files.joint.as_ref().map(|file| file.keys().section(name)).transpose()?;
            Ok(section.is_some_and(|section| !section.is_missing()))
        };
        // A checkpoint of a text model may have a processor_config.json about other things.
        let is_empty = files.plain.is_none() && files.video.is_none() && !holds(IMAGE_PROCESSOR)?;
        Ok((!is_empty).then_some(files))
    }

    /// Returns the keys of a kind of media: those of the object `section` of the joint file or, without one, those of a
    /// file of its own. Transformers prefer them in this order.
    fn keys<'a>(&'a self, section: &str, own: Option<&'a ConfigFile>) -> Result<Option<Keys<'a>>, LoadError> {
        let joint = self.joint.as_ref().map(|file| file.keys().section(section)).transpose()?;
        Ok(joint.filter(|keys| !keys.is_missing()).or_else(|| own.map(ConfigFile::keys)))
    }

    /// Reads the preparation of images.
    pub fn images(&self, dir: &Path, vision: &VisionConfig) -> Result<PixelPreparation, LoadError> {
        let keys = self.keys(IMAGE_PROCESSOR, self.plain.as_ref())?.ok_or_else(|| missing(dir))?;
        keys.get(&IMAGE_PROCESSOR_TYPE)?;
        pixels(&keys, vision)
    }

    /// Reads the preparation of videos. Without keys of their own, videos are prepared like images.
    pub fn videos(&self, dir: &Path, vision: &VisionConfig) -> Result<PixelPreparation, LoadError> {
        match self.keys(VIDEO_PROCESSOR, self.video.as_ref())? {
            Some(keys) => {
                keys.get(&VIDEO_PROCESSOR_TYPE)?;
                pixels(&keys, vision)
            }
            None => self.images(dir, vision),
        }
    }

    /// Checks the preparation of sound, which has one form only.
    pub fn check_sound(&self, dir: &Path, audio: &AudioConfig) -> Result<(), LoadError> {
        let keys = self.keys(FEATURE_EXTRACTOR, self.plain.as_ref())?.ok_or_else(|| missing(dir))?;
        keys.need(&FEATURE_EXTRACTOR_TYPE)?;
        keys.get(&SAMPLING_RATE)?;
        keys.get(&HOP_LENGTH)?;
        keys.get(&N_FFT)?;
        keys.get(&DITHER)?;
        let bins = keys.need(&FEATURE_SIZE)?;
        if bins != audio.bins {
            let problem = format!("is {bins}, but num_mel_bins of audio_config is {}", audio.bins);
            return Err(keys.invalid(&FEATURE_SIZE, problem));
        }
        Ok(())
    }
}

/// Names of the objects of `processor_config.json`.
const IMAGE_PROCESSOR: &str = "image_processor";
const VIDEO_PROCESSOR: &str = "video_processor";
const FEATURE_EXTRACTOR: &str = "feature_extractor";

fn missing(dir: &Path) -> LoadError {
    let problem = "is missing: it says how media are prepared for the encoder".into();
    LoadError::Config { path: dir.join(PreprocessorFiles::NAME), problem }
}

/// Reads the keys of an image or a video processor, and compares them with the encoder's.
fn pixels(keys: &Keys<'_>, vision: &VisionConfig) -> Result<PixelPreparation, LoadError> {
    for (key, of_encoder) in
        [(&PATCH_SIZE, vision.patch), (&MERGE_SIZE, vision.merge), (&TEMPORAL_PATCH_SIZE, vision.temporal)]
    {
        let size = keys.need(key)?;
        if size != of_encoder {
            return Err(keys.invalid(key, format!("is {size}, but the vision_config has {of_encoder}")));
        }
    }
    // It would let sizes depend on the number of frames in another way.
    if keys.get(&CAP_PIXELS_PER_FRAME)? == Some(true) {
        return Err(keys.invalid(&CAP_PIXELS_PER_FRAME, "true is not supported"));
    }
    for key in [&DO_RESIZE, &DO_RESCALE, &DO_NORMALIZE, &DO_CONVERT_RGB] {
        if keys.get(key)? == Some(false) {
            return Err(keys.invalid(key, "false is not supported"));
        }
    }
    keys.get(&RESCALE_FACTOR)?;
    keys.get(&RESAMPLE)?;
    let size = keys.section(ranges::SIZE)?;
    let edge = |of_size, plain| -> Result<u64, LoadError> {
        // As in transformers, the older key counts where a file has both.
        match keys.get(plain)?.or(size.get(of_size)?) {
            Some(edge) => Ok(edge as u64),
            None => Err(size.missing(of_size)),
        }
    };
    let limits = PixelLimits {
        shortest_edge: edge(&SHORTEST_EDGE, &MIN_PIXELS)?,
        longest_edge: edge(&LONGEST_EDGE, &MAX_PIXELS)?,
    };
    let token = (vision.patch * vision.merge) as u64;
    let PixelLimits { shortest_edge, longest_edge } = limits;
    if shortest_edge > longest_edge || longest_edge < token * token {
        let problem = format!("{longest_edge} pixels hold no size of at least {shortest_edge} and one token");
        return Err(size.invalid(&LONGEST_EDGE, problem));
    }
    // Their defaults differ from class to class, and published files have them.
    let of_channels = |key: &Key<Vec<f64>>| -> Result<[f64; 3], LoadError> {
        let values = keys.need(key)?;
        let length = values.len();
        values.try_into().map_err(|_| keys.invalid(key, format!("has {length} entries, must have 3")))
    };
    let (mean, deviation) = (of_channels(&IMAGE_MEAN)?, of_channels(&IMAGE_STD)?);
    let channel = |index: usize| Channel { mean: mean[index] as f32, deviation: deviation[index] as f32 };
    Ok(PixelPreparation { limits, channels: [0, 1, 2].map(channel) })
}

#[cfg(test)]
mod tests;
