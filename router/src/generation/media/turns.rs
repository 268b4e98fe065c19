//! The order of the tokens of a video and of its sound, which is the order of their times: that of
//! `replace_video_with_audio_token` in transformers (`models/qwen3_omni_moe/processing_qwen3_omni_moe.py`).

use tutti_proto::cluster::v1 as pb;

use super::super::decode::Turns;

/// One of the two that take turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// The video.
    Video,
    /// Its sound.
    Sound,
}

impl Turns {
    /// Returns the runs of a video of `tokens` tokens, whose grid `video` has, and of its `sound` tokens of sound. All
    /// tokens of a patch of frames are in front of the first token of sound that is not earlier. Times are f64, as in
    /// the reference, whose positions are f32. So a position may differ from the order by a rounding.
    pub fn runs(&self, video: &pb::MediaItem, tokens: u32, sound: u32) -> Vec<(Stream, u32)> {
        let patches = video.grid.as_ref().map_or(1, |grid| grid.frames.max(1));
        let mut runs: Vec<(Stream, u32)> = Vec::new();
        let mut push = |stream, tokens| match runs.last_mut() {
            _ if tokens == 0 => {}
            Some(run) if run.0 == stream => run.1 += tokens,
            _ => runs.push((stream, tokens)),
        };
        let mut heard = 0;
        for patch in 0..patches {
            let at = f64::from(patch) * self.seconds_per_patch * self.positions_per_second;
            // Tokens of sound in front of the patch: as many as have whole numbers below its time.
            let before = (at.ceil() as u32).min(sound);
            push(Stream::Sound, before - heard);
            push(Stream::Video, tokens / patches);
            heard = before;
        }
        push(Stream::Sound, sound - heard);
        runs
    }
}

#[cfg(test)]
mod tests;
