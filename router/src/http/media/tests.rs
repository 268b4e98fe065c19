use serde_json::json;

use super::*;

/// Takes the item of a part with one member.
fn part(name: &str, value: serde_json::Value) -> Result<Media, Error> {
    let body = json!({ name: value }).to_string();
    let value: &RawValue = serde_json::from_str(&body).unwrap();
    let mut fields = Fields::of_value("p", value).unwrap();
    take(name, "p", &mut fields).unwrap()
}

fn url(name: &str, url: &str) -> Result<Media, Error> {
    part(name, json!({ "url": url }))
}

#[test]
fn data_urls_become_items() {
    let picture = url("image_url", "data:image/jpg;base64,AQI=").unwrap();
    let expected = Media {
        path: "p.image_url".into(),
        kind: MediaKind::Image,
        format: "jpeg".into(),
        data: vec![vec![1, 2]],
        url: None,
        fps: None,
        detail: Detail::Full,
        is_sound_of_video: false,
    };
    assert_eq!(picture, expected);
    let low =
        part("image_url", json!({ "url": "DATA:image/PNG;name=x;base64,AQI=", "detail": "low" })).unwrap();
    assert_eq!(low, Media { format: "png".into(), detail: Detail::Low, ..expected });
    for (media_type, format) in [("mpeg", "mp3"), ("x-wav", "wav"), ("flac", "flac")] {
        let sound = url("audio_url", &format!("data:audio/{media_type};base64,AQI=")).unwrap();
        assert_eq!((sound.kind, sound.format.as_str()), (MediaKind::Audio, format));
    }
    let video = part("video_url", json!({ "url": "data:video/jpeg;base64,AQ==,Ag==", "fps": 2 })).unwrap();
    assert_eq!((video.kind, video.data, video.fps), (MediaKind::Video, vec![vec![1], vec![2]], Some(2.0)));
    let sound = part("input_audio", json!({ "data": "AQI=", "format": "wav" })).unwrap();
    assert_eq!((sound.path.as_str(), sound.data), ("p.input_audio", vec![vec![1, 2]]));
}

#[test]
fn urls_of_hosts_become_items_without_data() {
    for (given, url_of) in [
        ("http://127.0.0.1/x.png", "http://127.0.0.1/x.png"),
        ("HTTPS://A.example:443/b c?d", "https://a.example/b%20c?d"),
    ] {
        let picture = part("image_url", json!({ "url": given, "detail": "low" })).unwrap();
        assert_eq!(picture.url.as_ref().map(|url| url.as_str()), Some(url_of));
        assert_eq!((picture.data.len(), picture.detail, picture.fps), (0, Detail::Low, None));
    }
    assert_eq!(url("audio_url", "http://a/b").unwrap().kind, MediaKind::Audio);
}

#[test]
fn other_urls_and_other_mistakes_are_refused_by_name() {
    let refused = |result: Result<Media, Error>, field: &str, words: &str| {
        let error = result.unwrap_err();
        assert!(error.field() == Some(field) && error.message().contains(words), "{error:?}");
    };
    let path = "p.image_url.url";
    for scheme in ["file", "FTP"] {
        let fetched = url("image_url", &format!("{scheme}://127.0.0.1/x.png"));
        refused(fetched, path, "which is not fetched: send the data, as data:image/png;base64,DATA");
    }
    for broken in ["http:", "https://", "http://[1/x.png"] {
        refused(url("image_url", broken), path, "is no URL");
    }
    let film = url("video_url", "https://127.0.0.1/x.mp4");
    refused(film, "p.video_url.url", "is https:, which is not fetched: send the data, as data:video/jpeg");
    for no_url in ["AQI=", "", "://", "dätä:"] {
        refused(url("image_url", no_url), path, "is no data URL");
    }
    for bare in ["data", "DATA", "data:"] {
        refused(url("image_url", bare), path, "is a data URL without data");
    }
    refused(url("image_url", "data:image/png;base64"), path, "without data");
    refused(url("image_url", "data:image/png,AQI="), path, "without base64");
    refused(url("image_url", "data:audio/wav;base64,AQI="), path, "has the type \"audio/wav\"");
    refused(url("image_url", "data:;base64,AQI="), path, "has the type \"\"");
    refused(url("image_url", "data:image/png;base64,A"), path, "is not base64");
    refused(url("video_url", "data:video/png;base64,AQ==,A"), "p.video_url.url", "is not base64");
    let many = format!("data:video/png;base64,{}", vec!["AQ=="; 4097].join(","));
    refused(url("video_url", &many), "p.video_url.url", "more than 4096 frames");
    refused(
        url("video_url", &format!("data:video/png;base64,{}", ",".repeat(1 << 20))),
        "p.video_url.url",
        "4096",
    );
    let detail = part("image_url", json!({ "url": "data:image/png;base64,AQ==", "detail": "best" }));
    refused(detail, "p.image_url.detail", "one of auto, low, high");
    let fps = part("image_url", json!({ "url": "data:image/png;base64,AQ==", "fps": 2 }));
    refused(fps, "p.image_url.fps", "not a parameter");
    refused(
        part("video_url", json!({ "url": "data:video/png;base64,AQ==", "fps": "two" })),
        "p.video_url.fps",
        "",
    );
    refused(part("audio_url", json!("data:audio/wav;base64,AQ==")), "p.audio_url", "");
}
