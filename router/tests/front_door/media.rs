//! Pictures, recordings and videos: content parts and gRPC's media become canonical items with expanded prompts,
//! and hostile ones are refused by name.

use axum::http::StatusCode;
use base64::prelude::{BASE64_STANDARD, Engine as _};
use serde_json::{Value, json};
use tonic::Status;
use tutti_proto::{
    cluster::v1::{
        ClipInput, MediaGrid, MediaInput, MediaItem, MediaKind, PixelCount, PixelInput, Timestamps,
        media_input::Form,
    },
    v1::{GenerateRequest, Media, TokenIds, generate_request::Prompt, media::Kind},
};
use tutti_router::RouterSettings;
use tutti_runtime::Error;

use crate::{
    grpc::generate,
    support::{self, Answer, Setup, ids_of},
};

const CHAT: &str = "/v1/chat/completions";
/// A JPEG of 24 times 16 pixels.
const PICTURE: &[u8] = include_bytes!("../../media/src/picture/fixtures/corners.jpg");

/// The markers of the families that are served, with ids from 264.
const MARKERS: [&str; 8] = [
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_start|>",
    "<|audio_pad|>",
];

/// A template in the manner of those that are published: it goes through the parts, and writes sentinels itself.
const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n\
    {% if message.content is string %}{{ message.content }}{% else %}{% for content in message.content %}\
    {% if content.type == 'image' or 'image' in content or 'image_url' in content %}<|vision_start|><|image_pad|><|vision_end|>\
    {% elif content.type == 'video' or 'video' in content %}<|vision_start|><|video_pad|><|vision_end|>\
    {% elif content.type == 'audio' or 'audio' in content %}<|audio_start|><|audio_pad|>\
    {% elif 'text' in content %}{{ content.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}";

fn id(marker: &str) -> u32 {
    ids_of(marker, &MARKERS)[0]
}

fn input(kind: MediaKind, marker: &str, form: Form) -> MediaInput {
    MediaInput {
        kind: kind.into(),
        placeholder_token_id: id(marker),
        encoded_together: matches!(form, Form::Clips(_)),
        form: Some(form),
        width: 8,
        ..Default::default()
    }
}

fn inputs() -> Vec<MediaInput> {
    let pixels = PixelInput {
        patch: 4,
        merge: 2,
        temporal: 2,
        shortest_edge: 64,
        longest_edge: 4096,
        counted: PixelCount::PerFrame.into(),
        ..Default::default()
    };
    let sentinels = Timestamps { begin_token_id: id("<|vision_start|>"), end_token_id: id("<|vision_end|>") };
    let frames = PixelInput { timestamps: Some(sentinels), ..pixels };
    let clips = ClipInput { rate: 16_000, hop: 160, chunk: 100, halvings: 3, shortest: 201 };
    vec![
        input(MediaKind::Image, "<|image_pad|>", Form::Pixels(pixels)),
        input(MediaKind::Video, "<|video_pad|>", Form::Pixels(frames)),
        input(MediaKind::Audio, "<|audio_pad|>", Form::Clips(clips)),
    ]
}

async fn ready() -> Setup {
    ready_with(RouterSettings::default()).await
}

async fn ready_with(settings: RouterSettings) -> Setup {
    support::ready_for_media(settings, TEMPLATE, &MARKERS, inputs()).await
}

fn base64(bytes: &[u8]) -> String {
    BASE64_STANDARD.encode(bytes)
}

/// A WAV file of silence at 16 kHz.
fn wav(samples: u32) -> Vec<u8> {
    let mut file = b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0".to_vec();
    [16_000u32, 32_000].iter().for_each(|value| file.extend(value.to_le_bytes()));
    file.extend(b"\x02\0\x10\0data");
    file.extend((samples * 2).to_le_bytes());
    file.resize(file.len() + samples as usize * 2, 0);
    let rest = file.len() as u32 - 8;
    file[4..8].copy_from_slice(&rest.to_le_bytes());
    file
}

fn image(bytes: &[u8]) -> Value {
    json!({ "type": "image_url", "image_url": { "url": format!("data:image/jpeg;base64,{}", base64(bytes)) } })
}

fn sound(bytes: &[u8]) -> Value {
    json!({ "type": "input_audio", "input_audio": { "data": base64(bytes), "format": "wav" } })
}

fn video(frames: &[&[u8]], fps: f32) -> Value {
    let frames: Vec<String> = frames.iter().map(|frame| base64(frame)).collect();
    let url = format!("data:video/jpeg;base64,{}", frames.join(","));
    json!({ "type": "video_url", "video_url": { "url": url, "fps": fps } })
}

fn text(text: &str) -> Value {
    json!({ "type": "text", "text": text })
}

async fn chat(setup: &Setup, parts: Vec<Value>) -> Answer {
    setup.post(CHAT, &json!({ "messages": [{ "role": "user", "content": parts }] })).await
}

fn submitted(setup: &Setup) -> (Vec<u32>, Vec<MediaItem>) {
    let spec = setup.conductor.last().spec.unwrap();
    (spec.prompt, spec.media)
}

fn runs(item: &MediaItem) -> Vec<(u32, u32)> {
    item.runs.iter().map(|run| (run.first, run.tokens)).collect()
}

#[tokio::test]
async fn parts_become_items_whose_tokens_stand_between_the_template_s_sentinels() {
    let setup = ready().await;
    let parts = vec![image(PICTURE), text("a"), sound(&wav(8000)), text("<|image_pad|>")];
    let answer = chat(&setup, parts).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    let (prompt, media) = submitted(&setup);
    let head = ids_of("<|im_start|>user\n<|vision_start|>", &MARKERS);
    let first = head.len();
    // 16 × 24 pixels are six tokens, and 50 frames of sound are seven.
    let mut expected = head;
    expected.extend([id("<|image_pad|>"); 6]);
    expected.extend(ids_of("<|vision_end|>a<|audio_start|>", &MARKERS));
    let second = expected.len();
    expected.extend([id("<|audio_pad|>"); 7]);
    expected.extend(b"<|image_pad|>".map(u32::from));
    expected.push(id("<|im_end|>"));
    assert_eq!(prompt, expected, "a client's text makes no placeholder");
    let [picture, sound] = &media[..] else { panic!("{media:?}") };
    assert_eq!((picture.kind(), runs(picture)), (MediaKind::Image, vec![(first as u32, 6)]));
    assert_eq!(picture.grid, Some(MediaGrid { frames: 1, height: 4, width: 6 }));
    assert_eq!((picture.data.len(), picture.seconds_per_grid), (16 * 24 * 3, None));
    assert_eq!((sound.kind(), runs(sound)), (MediaKind::Audio, vec![(second as u32, 7)]));
    assert_eq!((&sound.data[..], &sound.grid), (&[0; 32_000][..], &None));
    let details = &answer.json()["usage"]["prompt_tokens_details"];
    assert_eq!(details, &json!({ "cached_tokens": 0, "audio_tokens": 7, "image_tokens": 6 }));
}

#[tokio::test]
async fn the_times_of_frames_stand_in_front_of_each_patch_of_frames() {
    let setup = ready().await;
    let answer = chat(&setup, vec![text("see"), video(&[PICTURE; 4], 2.0)]).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    let (prompt, media) = submitted(&setup);
    let pads = "<|video_pad|>".repeat(6);
    let patch = |time: &str| format!("<{time} seconds><|vision_start|>{pads}<|vision_end|>");
    let expected = format!("<|im_start|>user\nsee{}{}<|im_end|>", patch("0.2"), patch("1.2"));
    assert_eq!(prompt, ids_of(&expected, &MARKERS));
    assert_eq!(media[0].runs.len(), 2);
    assert_eq!((media[0].seconds_per_grid, media[0].grid.unwrap().frames), (Some(1.0), 2));
    let details = &answer.json()["usage"]["prompt_tokens_details"];
    assert_eq!(details, &json!({ "cached_tokens": 0, "video_tokens": 12 }));
}

#[tokio::test]
async fn low_detail_is_taken_and_text_alone_stays_one_string() {
    let setup = ready().await;
    let mut part = image(PICTURE);
    part["image_url"]["detail"] = json!("low");
    assert_eq!(chat(&setup, vec![part]).await.status, StatusCode::OK);
    let answer = setup.post(CHAT, &json!({ "messages": [{ "role": "user", "content": "x" }] })).await;
    assert_eq!(answer.status, StatusCode::OK);
    let (prompt, media) = submitted(&setup);
    assert_eq!(prompt, ids_of("<|im_start|>user\nx<|im_end|>", &MARKERS));
    assert!(media.is_empty());
    assert_eq!(answer.json()["usage"]["prompt_tokens_details"], json!({ "cached_tokens": 0 }));
}

#[tokio::test]
async fn grpc_takes_files_and_frames() {
    let setup = ready().await;
    let ids = vec![id("<|image_pad|>"), 97, id("<|video_pad|>"), id("<|video_pad|>"), id("<|audio_pad|>")];
    let media = |kind: Kind, format: &str, data: &[u8]| Media {
        kind: kind.into(),
        format: format.into(),
        data: data.to_vec(),
        ..Default::default()
    };
    let frames =
        Media { frames: vec![PICTURE.to_vec(); 3], fps: Some(1.0), ..media(Kind::Video, "jpeg", &[]) };
    let request = GenerateRequest {
        prompt: Some(Prompt::TokenIds(TokenIds { ids })),
        media: vec![media(Kind::Image, "jpeg", PICTURE), frames, media(Kind::Audio, "wav", &wav(16_000))],
        ..Default::default()
    };
    generate(&setup, request.clone()).await.unwrap();
    let (prompt, media) = submitted(&setup);
    assert_eq!(prompt.len(), 6 + 1 + 12 + 13);
    let found: Vec<_> = media.iter().map(runs).collect();
    assert_eq!(found, [vec![(0, 6)], vec![(7, 6), (13, 6)], vec![(19, 13)]]);
    let mut both = request.clone();
    both.media[1].data = vec![1];
    let field = |status: Status| Error::from(status).field().map(str::to_owned);
    let refused = generate(&setup, both).await.unwrap_err();
    assert_eq!(field(refused).as_deref(), Some("media[1].frames"));
    let mut none = request;
    none.media[0].kind = 0;
    assert!(generate(&setup, none).await.unwrap_err().message().contains("AUDIO, IMAGE or VIDEO"));
}

/// A PNG whose header claims a size, without pixels.
fn huge_png() -> Vec<u8> {
    let mut file = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR\0\0\xff\xff\0\0\xff\xff\x08\x02\0\0\0".to_vec();
    file.extend([0x39, 0x67, 0x4e, 0x07]);
    file
}

#[tokio::test]
async fn hostile_media_get_a_400_that_names_the_part() {
    // Sixteen seconds of sound.
    let setup = ready_with(support::settings(|settings| settings.max_media_bytes = 1 << 20)).await;
    let url = |name: &str, url: &str| json!({ "type": name, name: { "url": url } });
    let mut nan = wav(1);
    nan[20] = 3;
    nan[32..36].copy_from_slice(b"\x04\0\x20\0");
    nan[40..44].copy_from_slice(&4u32.to_le_bytes());
    nan[4..8].copy_from_slice(&40u32.to_le_bytes());
    nan.truncate(44);
    nan.extend(f32::NAN.to_le_bytes());
    let silence = {
        let mut frame = vec![0xff, 0xfb, 0x90, 0x00];
        frame.resize(417, 0);
        frame
    };
    let hours = json!({ "type": "input_audio",
        "input_audio": { "data": base64(&silence.repeat(1000)), "format": "mp3" } });
    let other = {
        let mut frame = PICTURE.to_vec();
        let at = frame.windows(2).position(|marker| marker == [0xff, 0xc0]).unwrap();
        frame[at + 6] = 8;
        frame
    };
    let cases = [
        (image(&huge_png()), "image_url", "pixels, more than the limit"),
        (image(&PICTURE[..40]), "image_url", "cannot be decoded"),
        (image(b"GIF89a"), "image_url", "is neither a JPEG, a PNG nor a WebP picture"),
        (url("image_url", "data:image/gif;base64,R0lG"), "image_url.format", "one of png, jpeg, webp"),
        (url("image_url", "https://127.0.0.1/x.png"), "image_url.url", "not fetched"),
        (url("image_url", "file:///etc/passwd"), "image_url.url", "not fetched"),
        (url("video_url", "data:video/mp4;base64,AAAA"), "video_url.format", "send the frames"),
        (url("video_url", "data:video/jpeg;base64,AAAA,AAAA"), "video_url.fps", "required"),
        (video(&[PICTURE, &other], 1.0), "video_url", "frame 1"),
        (sound(&nan), "input_audio", "not a finite number"),
        (sound(&wav(0)), "input_audio", "has no samples"),
        (sound(&wav(100)), "input_audio.data", "too short"),
        (hours, "input_audio", "more than the 1048576 that are left"),
    ];
    for (part, field, words) in cases {
        let answer = chat(&setup, vec![text("x"), part]).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{}", answer.text);
        let error = &answer.json()["error"];
        assert_eq!(error["param"], format!("messages[0].content[1].{field}"), "{}", answer.text);
        assert!(error["message"].as_str().is_some_and(|message| message.contains(words)), "{}", answer.text);
    }
    let many = vec![image(PICTURE); 65];
    let answer = chat(&setup, many).await;
    assert_eq!(answer.json()["error"]["param"], "messages[0].content[64].image_url", "{}", answer.text);
    assert_eq!(setup.conductor.count(), 0, "none reaches a conductor");
    let answer = chat(&setup, vec![image(PICTURE)]).await;
    assert_eq!(answer.status, StatusCode::OK, "the next request is served: {}", answer.text);
}

#[tokio::test]
async fn canonical_bytes_and_memory_are_bounded() {
    let few = support::settings(|settings| settings.max_media_bytes = 2 * 16 * 24 * 3);
    let setup = ready_with(few).await;
    assert_eq!(chat(&setup, vec![image(PICTURE); 2]).await.status, StatusCode::OK);
    let answer = chat(&setup, vec![image(PICTURE); 3]).await;
    assert_eq!(answer.json()["error"]["param"], "messages[0].content[2].image_url", "{}", answer.text);
    let none = support::settings(|settings| settings.max_media_memory = 1 << 20);
    let setup = ready_with(none).await;
    let answer = chat(&setup, vec![image(PICTURE)]).await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{}", answer.text);
    let answer = setup.post(CHAT, &json!({ "messages": [{ "role": "user", "content": "x" }] })).await;
    assert_eq!(answer.status, StatusCode::OK);
}

#[tokio::test]
async fn a_model_without_media_refuses_each_kind() {
    let setup = support::ready_for_media(RouterSettings::default(), TEMPLATE, &MARKERS, Vec::new()).await;
    for (part, kind) in
        [(image(PICTURE), "image"), (sound(&wav(8000)), "audio"), (video(&[PICTURE], 1.0), "video")]
    {
        let answer = chat(&setup, vec![part]).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(&format!("is {kind}, which the model does not take")), "{message}");
    }
}
