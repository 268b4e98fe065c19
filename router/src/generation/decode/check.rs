//! Checks of media before anything is decoded.

use tutti_proto::{
    cluster::v1::MediaKind,
    declaration::{MediaForm, MediaInput},
};
use tutti_runtime::Error;
use tutti_settings::RouterSettings;

use super::{super::request::Media, fetch, seconds_per_patch};
use crate::served::ServedModel;

/// Formats of pictures and frames. Decoders look at the bytes, because clients often name another format.
const PICTURES: [&str; 3] = ["png", "jpeg", "webp"];
/// Formats of recordings.
const RECORDINGS: [&str; 3] = ["wav", "mp3", "flac"];

/// Checks what can be checked before anything is decoded: the number of items, their kinds, formats and options.
pub fn check(media: &[Media], model: &ServedModel, limits: &RouterSettings) -> Result<(), Error> {
    if let Some(item) = media.get(limits.max_media_items) {
        let message = format!(
            "is one of {} items of media, but a request may have at most {}",
            media.len(),
            limits.max_media_items
        );
        return Err(Error::invalid(&item.path, message));
    }
    let inputs = model.media_inputs();
    media.iter().enumerate().try_for_each(|(index, item)| {
        let input = input_of(item, &inputs)?;
        if item.is_sound_of_video {
            check_sound(item, index.checked_sub(1).map(|before| &media[before]), &inputs)?;
        }
        match (&item.url, input.form) {
            (Some(_), MediaForm::Bytes { .. }) => {
                let message = "is not fetched, because the model takes data whose format the request names";
                Err(Error::invalid(format!("{}.url", item.path), message))
            }
            (Some(url), _) => fetch::check(&item.path, url, limits),
            (None, _) => check_item(item, input),
        }
    })
}

/// Checks the sound of a video, which is the item before.
fn check_sound(item: &Media, before: Option<&Media>, inputs: &[MediaInput]) -> Result<(), Error> {
    let refused = |message: String| Err(Error::invalid(&item.path, message));
    if item.kind != MediaKind::Audio {
        return refused(format!("is {}, which is no sound of a video", kind_name(item.kind)));
    }
    let Some(video) = before.filter(|before| before.kind == MediaKind::Video) else {
        return refused("is the sound of a video, but the item before is none".into());
    };
    match input_of(video, inputs)?.form {
        MediaForm::Pixels(pixels) if pixels.sound.is_some() => Ok(()),
        _ => refused("is the sound of a video, but the model takes no sound within videos".into()),
    }
}

pub(super) fn input_of<'a>(item: &Media, inputs: &'a [MediaInput]) -> Result<&'a MediaInput, Error> {
    let kind = kind_name(item.kind);
    inputs
        .iter()
        .find(|input| input.kind == item.kind)
        .ok_or_else(|| Error::invalid(&item.path, format!("is {kind}, which the model does not take")))
}

fn kind_name(kind: MediaKind) -> String {
    kind.as_str_name().to_lowercase()
}

fn check_item(item: &Media, input: &MediaInput) -> Result<(), Error> {
    let refused =
        |member: &str, message: String| Err(Error::invalid(format!("{}.{member}", item.path), message));
    let kind = kind_name(item.kind);
    let known: Vec<&str> = match (&input.form, item.kind) {
        (MediaForm::Bytes { .. }, _) => input.formats.iter().map(String::as_str).collect(),
        (_, MediaKind::Audio) => RECORDINGS.to_vec(),
        _ => PICTURES.to_vec(),
    };
    if !known.contains(&item.format.as_str()) {
        let (format, known) = (&item.format, known.join(", "));
        return match item.kind {
            MediaKind::Video => refused(
                "format",
                format!(
                    "is {format:?}, a container that is not decoded here: send the frames as \
                     data:video/jpeg;base64,FRAME,FRAME with fps (also png and webp)"
                ),
            ),
            _ => refused("format", format!("is {format:?}, but {kind} must be one of {known}")),
        };
    }
    if item.data.is_empty() || item.data.iter().any(Vec::is_empty) {
        return refused("data", "is empty".into());
    }
    if item.data.len() > 1 && item.kind != MediaKind::Video {
        return refused("frames", format!("cannot be several, because the item is {kind}"));
    }
    match (item.kind, item.fps, input.form) {
        (MediaKind::Video, None, MediaForm::Pixels(_)) if item.data.len() > 1 => {
            refused("fps", "is required for two frames or more: the number of frames per second".into())
        }
        (MediaKind::Video, Some(fps), MediaForm::Pixels(pixels))
            if !(seconds_per_patch(&pixels, fps) <= 3600.0 && fps <= 1000.0) =>
        {
            refused("fps", format!("is {fps}, but must be above 0 and at most 1000"))
        }
        (MediaKind::Video, ..) | (_, None, _) => Ok(()),
        (_, Some(_), _) => refused("fps", format!("belongs to videos, but the item is {kind}")),
    }
}
