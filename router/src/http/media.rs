//! Media in content parts: OpenAI's `input_audio` and `image_url`, and vLLM's `audio_url` and `video_url`.
//!
//! The data are in the request, as base64, or at a URL from which the router fetches them, if its settings allow the
//! origin. Frames of a video are always in the request.

use std::borrow::Cow;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use reqwest::Url;
use serde::Deserialize;
use serde_json::value::RawValue;
use tutti_proto::cluster::v1::MediaKind;
use tutti_runtime::Error;

use super::fields::Fields;
use crate::generation::{Detail, Media};

/// Maximum number of frames of one video that are parsed.
const MAX_FRAMES: usize = 4096;

/// A type of content parts that hold media.
struct PartType {
    /// The part's `type`, and the name of its member.
    name: &'static str,
    kind: MediaKind,
    parse: fn(&str, &RawValue, MediaKind) -> Result<Media, Error>,
}

const PART_TYPES: [PartType; 4] = [
    PartType { name: "image_url", kind: MediaKind::Image, parse: url },
    PartType { name: "input_audio", kind: MediaKind::Audio, parse: input_audio },
    PartType { name: "audio_url", kind: MediaKind::Audio, parse: url },
    PartType { name: "video_url", kind: MediaKind::Video, parse: url },
];

/// The types of parts with media.
pub fn part_types() -> impl Iterator<Item = &'static str> {
    PART_TYPES.iter().map(|part| part.name)
}

/// Takes the item of a part of the type `name`. `None` if parts of this type hold no media.
pub fn take(name: &str, path: &str, fields: &mut Fields<'_>) -> Option<Result<Media, Error>> {
    let PartType { name, kind, parse } = PART_TYPES.iter().find(|part| part.name == name)?;
    let value = fields.require::<&RawValue>(name);
    Some(value.and_then(|value| parse(&format!("{path}.{name}"), value, *kind)))
}

/// A text, borrowed if it has no escapes. Media are long.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

/// Parses base64 data and a format.
fn input_audio(path: &str, value: &RawValue, kind: MediaKind) -> Result<Media, Error> {
    let mut fields = Fields::of_value(path, value)?;
    let (data, format): (Text<'_>, String) = (fields.require("data")?, fields.require("format")?);
    let data = decode(&fields.name("data"), &data.0)?;
    fields.finish()?;
    let (path, data) = (path.into(), vec![data]);
    let (detail, is_sound_of_video) = (Detail::Full, false);
    Ok(Media { path, kind, format, data, url: None, fps: None, detail, is_sound_of_video })
}

/// Parses a URL, with the options that its kind has.
fn url(path: &str, value: &RawValue, kind: MediaKind) -> Result<Media, Error> {
    let mut fields = Fields::of_value(path, value)?;
    let name = fields.name("url");
    let url: Text<'_> = fields.require("url")?;
    let (format, data, url) = match is_fetched(&url.0, kind) {
        true => {
            let url = Url::parse(&url.0).map_err(|e| Error::invalid(&name, format!("is no URL: {e}")))?;
            (String::new(), Vec::new(), Some(url))
        }
        false => {
            let (format, data) = inline(&name, &url.0, kind)?;
            (format, data, None)
        }
    };
    let detail = if kind == MediaKind::Image { detail(&mut fields)? } else { Detail::Full };
    let fps = if kind == MediaKind::Video { fields.take("fps")? } else { None };
    fields.finish()?;
    Ok(Media { path: path.into(), kind, format, data, url, fps, detail, is_sound_of_video: false })
}

/// True for the URL of a file on a host. Videos are no files: their frames are in the request.
fn is_fetched(url: &str, kind: MediaKind) -> bool {
    let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
    let is_of_host = ["http", "https"].iter().any(|known| scheme.eq_ignore_ascii_case(known));
    is_of_host && kind != MediaKind::Video
}

/// The format and the files of a data URL.
fn inline(name: &str, url: &str, kind: MediaKind) -> Result<(String, Vec<Vec<u8>>), Error> {
    let (subtype, pieces) = data_url(name, url, kind)?;
    // A body of nothing but commas has millions of pieces.
    let pieces: Vec<&str> = match kind {
        MediaKind::Video => pieces.split(',').take(MAX_FRAMES + 1).collect(),
        _ => vec![pieces],
    };
    if pieces.len() > MAX_FRAMES {
        return Err(Error::invalid(name, format!("has more than {MAX_FRAMES} frames")));
    }
    let data = pieces.into_iter().map(|piece| decode(name, piece)).collect::<Result<_, _>>()?;
    Ok((format_of(&subtype), data))
}

fn detail(fields: &mut Fields<'_>) -> Result<Detail, Error> {
    match fields.take::<String>("detail")?.as_deref() {
        None | Some("auto" | "high") => Ok(Detail::Full),
        Some("low") => Ok(Detail::Low),
        Some(other) => {
            let message = format!("is {other:?}, but must be one of auto, low, high");
            Err(Error::invalid(fields.name("detail"), message))
        }
    }
}

/// The subtype and the base64 of a URL such as `data:image/png;base64,…`, whose type must be that of the kind.
fn data_url<'a>(name: &str, url: &'a str, kind: MediaKind) -> Result<(String, &'a str), Error> {
    let (example, type_name) = match kind {
        MediaKind::Image => ("data:image/png;base64,DATA", "image"),
        MediaKind::Video => ("data:video/jpeg;base64,FRAME,FRAME", "video"),
        MediaKind::Audio | MediaKind::Unspecified => ("data:audio/wav;base64,DATA", "audio"),
    };
    let refused = |problem: &str| Error::invalid(name, format!("{problem}: send the data, as {example}"));
    let (scheme, content) = url.split_once(':').unwrap_or((url, ""));
    if !scheme.eq_ignore_ascii_case("data") {
        let is_known =
            ["http", "https", "file", "ftp"].iter().any(|known| scheme.eq_ignore_ascii_case(known));
        return Err(match is_known {
            true => refused(&format!("is {}:, which is not fetched", scheme.to_ascii_lowercase())),
            false => refused("is no data URL"),
        });
    }
    let (head, data) = content.split_once(',').ok_or_else(|| refused("is a data URL without data"))?;
    let mut parameters = head.split(';');
    let media_type = parameters.next().unwrap_or_default().trim().to_ascii_lowercase();
    if !parameters.any(|parameter| parameter.trim().eq_ignore_ascii_case("base64")) {
        return Err(refused("is a data URL without base64"));
    }
    match media_type.split_once('/') {
        Some((given, subtype)) if given == type_name => Ok((subtype.to_owned(), data)),
        _ => Err(refused(&format!("has the type {media_type:?}"))),
    }
}

/// The format that a subtype stands for. Clients write several names for some.
fn format_of(subtype: &str) -> String {
    let format = match subtype {
        "jpg" | "pjpeg" => "jpeg",
        "x-png" => "png",
        "x-wav" | "wave" | "vnd.wave" => "wav",
        "mpeg" | "mpeg3" | "x-mp3" => "mp3",
        "x-flac" => "flac",
        other => other,
    };
    format.to_owned()
}

fn decode(name: &str, base64: &str) -> Result<Vec<u8>, Error> {
    BASE64_STANDARD.decode(base64).map_err(|e| Error::invalid(name, format!("is not base64: {e}")))
}

#[cfg(test)]
mod tests;
