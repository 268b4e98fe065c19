use tutti_proto::cluster::v1::media_input::Form;

use super::*;
use crate::served::ServedText;

const CLIPS: pb::ClipInput = pb::ClipInput { rate: 16_000, hop: 160, chunk: 100, halvings: 3, shortest: 201 };

fn pixels() -> pb::PixelInput {
    pb::PixelInput {
        patch: 4,
        merge: 2,
        temporal: 2,
        shortest_edge: 64,
        longest_edge: 4096,
        counted: pb::PixelCount::PerFrame.into(),
        ..Default::default()
    }
}

fn model(inputs: Vec<(MediaKind, Form)>) -> Arc<ServedModel> {
    let input = |(kind, form): (MediaKind, Form)| {
        let formats = if matches!(form, Form::BytesPerToken(_)) { vec!["raw".into()] } else { vec![] };
        let encoded_together = matches!(form, Form::Clips(_));
        pb::MediaInput {
            kind: kind.into(),
            form: Some(form),
            width: 2,
            formats,
            encoded_together,
            ..Default::default()
        }
    };
    let media = inputs.into_iter().map(input).collect();
    let description = pb::ModelDescription {
        max_context_tokens: 256,
        max_request_tokens: 256,
        declaration: Some(pb::ModelDeclaration { media, ..Default::default() }),
        ..Default::default()
    };
    let text = ServedText {
        tokenizer: None,
        template: None,
        defaults: Default::default(),
        dialect: Default::default(),
    };
    Arc::new(ServedModel { description, text: Arc::new(text) })
}

fn omni() -> Arc<ServedModel> {
    let timed = pb::PixelInput {
        timestamps: Some(pb::Timestamps { begin_token_id: 1, end_token_id: 2 }),
        ..pixels()
    };
    model(vec![
        (MediaKind::Audio, Form::Clips(CLIPS)),
        (MediaKind::Image, Form::Pixels(pixels())),
        (MediaKind::Video, Form::Pixels(timed)),
    ])
}

pub(super) fn item(kind: MediaKind, format: &str, data: Vec<Vec<u8>>) -> Media {
    let (path, format) = ("media[0]".into(), format.into());
    Media { path, kind, format, data, url: None, fps: None, detail: Detail::Full, is_sound_of_video: false }
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

async fn decode(pool: &MediaPool, media: Vec<Media>) -> Result<DecodedMedia, Error> {
    decode_with(pool, media, RouterSettings::default()).await
}

pub(super) async fn decode_with(
    pool: &MediaPool,
    media: Vec<Media>,
    limits: RouterSettings,
) -> Result<DecodedMedia, Error> {
    check(&media, &omni(), &limits)?;
    pool.decode(Files { media, upload: None }, omni(), Arc::new(limits), Share::default(), 1).await
}

pub(super) fn pool(change: impl FnOnce(&mut RouterSettings)) -> MediaPool {
    let mut settings = RouterSettings::default();
    change(&mut settings);
    MediaPool::new(&settings).unwrap()
}

pub(super) fn held(pool: &MediaPool) -> u64 {
    pool.memory.held.lock().held()
}

pub(super) const PICTURE: &[u8] = include_bytes!("../../../media/src/picture/fixtures/corners.jpg");

#[tokio::test]
async fn items_become_canonical_and_their_memory_is_held_until_they_are_dropped() {
    let pool = pool(|_| {});
    let video = Media { fps: Some(4.0), ..item(MediaKind::Video, "jpeg", vec![PICTURE.to_vec(); 3]) };
    let media = vec![
        item(MediaKind::Image, "jpeg", vec![PICTURE.to_vec()]),
        item(MediaKind::Audio, "wav", vec![wav(16_000)]),
        video,
    ];
    let decoded = decode(&pool, media).await.unwrap();
    let [picture, sound, video] = &decoded.items[..] else { panic!("three items") };
    // 16 × 24 pixels are 4 × 6 patches, and tokens are of 2 × 2.
    assert_eq!(picture.item.grid, Some(pb::MediaGrid { frames: 1, height: 4, width: 6 }));
    assert_eq!((picture.tokens, picture.item.data.len()), (6, 16 * 24 * 3));
    assert_eq!((sound.tokens, sound.item.data.len()), (13, 64_000));
    assert_eq!(video.item.grid, Some(pb::MediaGrid { frames: 2, height: 4, width: 6 }));
    assert_eq!((video.tokens, video.item.data.len()), (12, 3 * 16 * 24 * 3));
    assert_eq!(video.item.seconds_per_grid, Some(0.5));
    assert_eq!(video.times, ["<0.1 seconds>", "<0.5 seconds>"]);
    let bytes = decoded.items.iter().map(|item| item.item.data.len() as u64).sum::<u64>();
    assert_eq!(held(&pool), 2 * bytes, "one copy for each choice, and one for the prompt");
    drop(decoded);
    assert_eq!(held(&pool), 0);
}

#[tokio::test]
async fn a_video_and_its_sound_are_known_as_such() {
    let sentinels = pb::SoundSentinels { begin_token_id: 1, end_token_id: 2 };
    let timed = pb::PixelInput { sound: Some(sentinels), positions_per_second: 13.0, ..pixels() };
    let model = model(vec![(MediaKind::Audio, Form::Clips(CLIPS)), (MediaKind::Video, Form::Pixels(timed))]);
    let video = || Media { fps: Some(0.7), ..item(MediaKind::Video, "jpeg", vec![PICTURE.to_vec(); 3]) };
    let sound = || item(MediaKind::Audio, "wav", vec![wav(16_000)]);
    let of_video = || Media { is_sound_of_video: true, ..sound() };
    let (pool, limits) = (pool(|_| {}), Arc::new(RouterSettings::default()));
    let files = Files { media: vec![video(), of_video(), video(), sound()], upload: None };
    check(&files.media, &model, &limits).unwrap();
    let decoded = pool.decode(files, model.clone(), limits.clone(), Share::default(), 1).await.unwrap();
    let Pairing::Video(turns) = decoded.items[0].pairing else { panic!("the video has sound") };
    // Seconds have the precision of the reference.
    assert_eq!((turns.seconds_per_patch, turns.positions_per_second), (2.0 / 0.7, 13.0));
    assert_eq!((turns.sentinels.begin, turns.sentinels.end), (1, 2));
    let pairings: Vec<_> = decoded.items[1..].iter().map(|item| item.pairing).collect();
    assert_eq!(pairings, [Pairing::Sound, Pairing::Alone, Pairing::Alone]);
    let placeholders: Vec<_> = decoded.items.iter().map(DecodedItem::placeholders).collect();
    assert_eq!(placeholders, [1, 0, 1, 1]);
    let refused = |media: Vec<Media>, model: &ServedModel, words: &str| {
        let error = check(&media, model, &limits).unwrap_err();
        assert!(error.field() == Some("media[0]") && error.message().contains(words), "{error:?}");
    };
    refused(vec![of_video()], &model, "the item before is none");
    refused(vec![video(), of_video(), of_video()], &model, "the item before is none");
    refused(vec![video(), Media { is_sound_of_video: true, ..video() }], &model, "no sound of a video");
    refused(vec![video(), of_video()], &omni(), "takes no sound within videos");
}

#[tokio::test]
async fn what_can_be_checked_is_refused_by_name_before_anything_is_decoded() {
    let refused = |media: Media, field: &str, words: &str| {
        let error = check(&[media], &omni(), &RouterSettings::default()).unwrap_err();
        assert!(error.field() == Some(field) && error.message().contains(words), "{error:?}");
    };
    let picture = || item(MediaKind::Image, "png", vec![b"x".to_vec()]);
    let video = |frames: usize| item(MediaKind::Video, "jpeg", vec![b"x".to_vec(); frames]);
    refused(Media { format: "gif".into(), ..picture() }, "media[0].format", "one of png, jpeg, webp");
    refused(item(MediaKind::Audio, "aac", vec![b"x".to_vec()]), "media[0].format", "one of wav, mp3, flac");
    refused(Media { format: "mp4".into(), ..video(1) }, "media[0].format", "data:video/jpeg;base64,FRAME");
    refused(Media { data: vec![vec![]], ..picture() }, "media[0].data", "is empty");
    refused(Media { data: vec![], ..picture() }, "media[0].data", "is empty");
    refused(Media { data: vec![b"x".to_vec(); 2], ..picture() }, "media[0].frames", "several");
    refused(Media { fps: Some(1.0), ..picture() }, "media[0].fps", "belongs to videos");
    refused(video(2), "media[0].fps", "is required");
    for fps in [0.0, -1.0, f64::NAN, f64::INFINITY, 1001.0, 1e-9] {
        refused(Media { fps: Some(fps), ..video(2) }, "media[0].fps", "must be above 0");
    }
    assert!(check(&[video(1)], &omni(), &RouterSettings::default()).is_ok(), "one frame needs no rate");
    let deaf = model(vec![(MediaKind::Image, Form::Pixels(pixels()))]);
    let sound = item(MediaKind::Audio, "wav", vec![wav(1)]);
    let error = check(&[sound], &deaf, &RouterSettings::default()).unwrap_err();
    assert_eq!(
        (error.field(), error.message()),
        (Some("media[0]"), "is audio, which the model does not take")
    );
    let many = vec![picture(); 65];
    let error = check(&many, &omni(), &RouterSettings::default()).unwrap_err();
    assert!(error.message().contains("65 items of media, but a request may have at most 64"), "{error:?}");
}

#[tokio::test]
async fn errors_of_decoders_name_the_item() {
    let pool = pool(|_| {});
    let refused = async |media: Media, limits: RouterSettings, words: &str| {
        let error = decode_with(&pool, vec![media], limits).await.err().unwrap();
        assert!(error.field().is_some_and(|field| field.starts_with("media[0]")), "{error:?}");
        assert!(error.kind() == tutti_runtime::ErrorKind::InvalidArgument, "{error:?}");
        assert!(error.message().contains(words), "{error:?}");
        assert_eq!(held(&pool), 0);
    };
    let picture = || item(MediaKind::Image, "png", vec![PICTURE.to_vec()]);
    let limits = RouterSettings::default;
    refused(item(MediaKind::Image, "png", vec![b"x".to_vec()]), limits(), "is neither a JPEG").await;
    refused(picture(), RouterSettings { max_media_pixels: 383, ..limits() }, "more than the limit of 383")
        .await;
    refused(picture(), RouterSettings { max_media_bytes: 1151, ..limits() }, "has at least 1152 bytes once")
        .await;
    refused(item(MediaKind::Audio, "wav", vec![wav(100)]), limits(), "is too short").await;
    // 256 tokens are less than 21 seconds.
    refused(item(MediaKind::Audio, "wav", vec![wav(16_000 * 21)]), limits(), "longer than 20 seconds").await;
    let video =
        Media { fps: Some(1.0), ..item(MediaKind::Video, "png", vec![PICTURE.to_vec(), b"x".to_vec()]) };
    refused(video, limits(), "frame 1 is neither").await;
}

#[tokio::test]
async fn memory_that_others_hold_is_refused_for_now_and_more_than_all_for_good() {
    let pool = pool(|settings| settings.max_media_memory = 8 << 20);
    let picture = || vec![item(MediaKind::Image, "png", vec![PICTURE.to_vec()])];
    let others = pool.memory.held.lock().enter(8 << 20, Share::default(), 5 << 20).unwrap();
    let error = decode(&pool, picture()).await.err().unwrap();
    assert_eq!(error.kind(), tutti_runtime::ErrorKind::Overloaded, "{error:?}");
    pool.memory.held.lock().leave(others);
    assert!(decode(&pool, picture()).await.is_ok());
    let sound = vec![item(MediaKind::Audio, "wav", vec![wav(1600)])];
    let error = decode(&pool, sound).await.err().unwrap();
    assert_eq!(error.kind(), tutti_runtime::ErrorKind::InvalidArgument, "16 MiB never fit: {error:?}");
}

/// An increment that fits is no hope if the sum does not.
#[tokio::test]
async fn more_choices_than_there_is_memory_for_are_refused_for_good() {
    let pool = pool(|settings| settings.max_media_memory = 32 << 20);
    let limits = || Arc::new(RouterSettings::default());
    let sound = || Files { media: vec![item(MediaKind::Audio, "wav", vec![wav(16_000)])], upload: None };
    // A copy has 64,000 bytes, and 24 MiB are for large amounts: 393 copies alone fit, but not beside the first.
    let many = pool.decode(sound(), omni(), limits(), Share::default(), 393).await.err().unwrap();
    assert_eq!((many.kind(), many.field()), (tutti_runtime::ErrorKind::InvalidArgument, Some("media[0]")));
    assert!(pool.decode(sound(), omni(), limits(), Share::default(), 391).await.is_ok());
    assert_eq!(held(&pool), 0);
}

#[tokio::test]
async fn what_one_call_of_an_encoder_cannot_take_is_refused_by_its_path_or_shrunk() {
    let limited = |inputs: Vec<(MediaKind, Form)>| {
        let mut model = Arc::into_inner(model(inputs)).unwrap();
        let declaration = model.description.declaration.as_mut().unwrap();
        declaration.media.iter_mut().for_each(|input| input.max_call_tokens = Some(4));
        Arc::new(model)
    };
    let (pool, limits) = (pool(|_| {}), || Arc::new(RouterSettings::default()));
    let sound = item(MediaKind::Audio, "wav", vec![wav(16_000 / 4)]);
    let files = |media: Vec<Media>| Files { media, upload: None };
    let deaf = limited(vec![(MediaKind::Audio, Form::Clips(CLIPS))]);
    let one = pool.decode(files(vec![sound.clone()]), deaf.clone(), limits(), Share::default(), 1).await;
    assert_eq!(one.unwrap().items[0].tokens, 4);
    let two = pool.decode(files(vec![sound.clone(), sound]), deaf, limits(), Share::default(), 1).await;
    let error = two.err().unwrap();
    assert!(error.field() == Some("media[0]") && error.message().contains("at most 4"), "{error:?}");
    // 16 x 24 pixels are six tokens.
    let picture = item(MediaKind::Image, "jpeg", vec![PICTURE.to_vec()]);
    let small = limited(vec![(MediaKind::Image, Form::Pixels(pixels()))]);
    let shrunk = pool.decode(files(vec![picture]), small, limits(), Share::default(), 1).await.unwrap();
    assert!(shrunk.items[0].tokens <= 4, "{}", shrunk.items[0].tokens);
}

#[test]
fn low_detail_has_fewer_pixels() {
    let pixels = PixelInput::from(pb::PixelInput { longest_edge: 1 << 24, patch: 16, ..pixels() });
    assert_eq!(size(&pixels, None, Detail::Full, 1, [2048, 1024]), Ok([2048, 1024]));
    assert_eq!(size(&pixels, None, Detail::Low, 1, [2048, 1024]), Ok([704, 352]));
}

#[test]
fn times_are_the_means_of_the_first_and_last_frames() {
    assert_eq!(times(1, 2, 1.0), ["<0.0 seconds>"]);
    assert_eq!(
        times(4, 2, 2.0),
        ["<0.2 seconds>", "<1.2 seconds>"],
        "a half goes to the even digit, as in Python"
    );
    assert_eq!(times(3, 2, 1.0), ["<0.5 seconds>", "<2.0 seconds>"], "the last frame is repeated");
}
