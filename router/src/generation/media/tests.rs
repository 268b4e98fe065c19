use std::sync::Arc;

use tutti_proto::{cluster::v1::media_input::Form, declaration::SoundSentinels};

use super::*;
use crate::{generation::decode::Turns, served::ServedText, text::tokenizer::Tokenizer};

const SOUND: u32 = 9;
const VIDEO: u32 = 260;
const BEGIN: u32 = 261;
const END: u32 = 262;

fn input(kind: MediaKind, placeholder_token_id: u32, form: Form) -> pb::MediaInput {
    pb::MediaInput {
        kind: kind.into(),
        placeholder_token_id,
        form: Some(form),
        width: 2,
        ..Default::default()
    }
}

fn model_with(media: Vec<pb::MediaInput>, tokenizer: Option<Arc<Tokenizer>>) -> ServedModel {
    let text =
        ServedText { tokenizer, template: None, defaults: Default::default(), dialect: Default::default() };
    let description = pb::ModelDescription {
        max_context_tokens: 16,
        max_request_tokens: 16,
        declaration: Some(pb::ModelDeclaration { media, ..Default::default() }),
        ..Default::default()
    };
    ServedModel { description, text: Arc::new(text) }
}

/// A model of sound, and of videos with the times of their frames between them.
fn model() -> ServedModel {
    let timestamps = Some(pb::Timestamps { begin_token_id: BEGIN, end_token_id: END });
    let pixels = pb::PixelInput { patch: 4, merge: 2, temporal: 2, timestamps, ..Default::default() };
    let inputs = vec![
        input(MediaKind::Audio, SOUND, Form::BytesPerToken(4)),
        input(MediaKind::Video, VIDEO, Form::Pixels(pixels)),
    ];
    model_with(inputs, Some(crate::test_support::tokenizer()))
}

fn item(kind: MediaKind, tokens: u32, times: &[&str]) -> DecodedItem {
    let placeholder = if kind == MediaKind::Video { VIDEO } else { SOUND };
    let times = times.iter().map(|time| (*time).to_owned()).collect();
    let item = pb::MediaItem { kind: kind.into(), ..Default::default() };
    DecodedItem { path: "media[0]".into(), item, tokens, placeholder, times, pairing: Pairing::Alone }
}

fn sound(tokens: u32) -> DecodedItem {
    item(MediaKind::Audio, tokens, &[])
}

fn runs(items: &[pb::MediaItem]) -> Vec<Vec<(u32, u32)>> {
    items.iter().map(|item| item.runs.iter().map(|run| (run.first, run.tokens)).collect()).collect()
}

#[test]
fn each_item_gets_the_placeholders_that_it_takes() {
    let (ids, items) = expand(vec![1, SOUND, 2, SOUND, 3], vec![sound(3), sound(1)], &model()).unwrap();
    assert_eq!(ids, [1, SOUND, SOUND, SOUND, 2, SOUND, 3]);
    assert_eq!(runs(&items), [[(1, 3)], [(5, 1)]]);
    assert_eq!(expand(vec![1], vec![], &model()).unwrap(), (vec![1], vec![]));
}

#[test]
fn a_video_with_times_has_a_run_for_each_patch_of_frames() {
    let video = item(MediaKind::Video, 4, &["<0.0 seconds>", "<1.0 seconds>"]);
    let ids = vec![1, VIDEO, 2, SOUND, VIDEO];
    // Items stand in the order of their first placeholders, so sound between the runs of a video is refused.
    let error = expand(ids, vec![video.clone(), sound(2)], &model()).unwrap_err();
    assert!(error.message().contains("for other media"), "{error:?}");
    let (ids, items) = expand(vec![1, VIDEO, 2, VIDEO, SOUND], vec![video, sound(2)], &model()).unwrap();
    assert_eq!(ids, [1, VIDEO, VIDEO, 2, VIDEO, VIDEO, SOUND, SOUND]);
    assert_eq!(runs(&items), [vec![(1, 2), (4, 2)], vec![(6, 2)]]);
}

/// A video of two patches of two tokens with its sound, half a second from one patch to the next.
fn with_sound(sound_tokens: u32) -> [DecodedItem; 2] {
    let sentinels = SoundSentinels { begin: 7, end: 8 };
    let turns = Turns { sentinels, seconds_per_patch: 0.5, positions_per_second: 4.0 };
    let mut video = item(MediaKind::Video, 4, &[]);
    video.item.grid = Some(pb::MediaGrid { frames: 2, height: 2, width: 4 });
    video.pairing = Pairing::Video(turns);
    [video, DecodedItem { pairing: Pairing::Sound, ..sound(sound_tokens) }]
}

#[test]
fn a_video_and_its_sound_have_one_placeholder_and_take_turns_between_their_sentinels() {
    let [video, track] = with_sound(3);
    let media = vec![sound(1), video, track, sound(1)];
    let (ids, items) = expand(vec![SOUND, 1, VIDEO, 2, SOUND], media, &model()).unwrap();
    let of_both = [7, VIDEO, VIDEO, SOUND, SOUND, VIDEO, VIDEO, SOUND, 8];
    assert_eq!(ids, [&[SOUND, 1][..], &of_both, &[2, SOUND]].concat());
    assert_eq!(runs(&items), [vec![(0, 1)], vec![(3, 2), (7, 2)], vec![(5, 2), (9, 1)], vec![(12, 1)]]);
    // The sentinels count.
    let error = expand(vec![VIDEO], with_sound(11).into(), &model()).unwrap_err();
    assert!(error.message().contains("has 17 tokens"), "{error:?}");
    let (ids, _) = expand(vec![VIDEO], with_sound(10).into(), &model()).unwrap();
    assert_eq!(ids.len(), 16);
    let error = expand(vec![VIDEO, SOUND], with_sound(1).into(), &model()).unwrap_err();
    assert!(error.message().contains("has 2 placeholders"), "{error:?}");
}

#[test]
fn media_without_a_matching_placeholder_are_refused() {
    let refused = |ids: &[u32], media: Vec<DecodedItem>, field: &str, words: &str| {
        let error = expand(ids.to_vec(), media, &model()).unwrap_err();
        assert!(error.field() == Some(field) && error.message().contains(words), "{error:?}");
    };
    let video = item(MediaKind::Video, 2, &[]);
    refused(&[1, SOUND], vec![], "prompt", "has 1 placeholders");
    refused(&[1], vec![sound(1)], "prompt", "has 0 placeholders");
    refused(&[SOUND], vec![video], "media[0]", "for other media");
    let timed = item(MediaKind::Video, 2, &["<0.0 seconds>", "<1.0 seconds>"]);
    refused(&[VIDEO], vec![timed], "prompt", "take 2, because a video takes one for each patch of frames");
    refused(&[SOUND], vec![sound(17)], "prompt", "17 tokens");
}

#[test]
fn times_stand_in_front_of_the_patches_of_frames() {
    let write = |text: &str, media: &[DecodedItem]| write_times(text.to_owned(), media, &model());
    let pad = model().text.tokenizer.as_ref().unwrap().added_text(VIDEO);
    let [begin, end] = [BEGIN, END].map(|id| model().text.tokenizer.as_ref().unwrap().added_text(id));
    let video = item(MediaKind::Video, 4, &["<0.2 seconds>", "<1.2 seconds>"]);
    let of_template = format!("a{begin}{pad}{end}b");
    let expected = format!("a<0.2 seconds>{begin}{pad}{end}<1.2 seconds>{begin}{pad}{end}b");
    assert_eq!(write(&of_template, std::slice::from_ref(&video)), expected);
    assert_eq!(write(&format!("a{pad}b"), &[sound(1), video.clone()]), expected, "without sentinels");
    let once = item(MediaKind::Video, 2, &["<0.0 seconds>"]);
    let two = write(&format!("{of_template}{of_template}"), &[video.clone(), once]);
    assert_eq!(two, format!("{expected}a<0.0 seconds>{begin}{pad}{end}b"));
    // Other numbers of placeholders are refused later.
    assert_eq!(write(&of_template, &[video.clone(), video]), of_template);
    assert_eq!(write(&of_template, &[item(MediaKind::Video, 2, &[])]), of_template);
    assert_eq!(write("", &[]), "");
}
