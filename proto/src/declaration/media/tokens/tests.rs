use super::*;
use crate::declaration::{PixelCount, WalkId};

const CLIPS: ClipInput = ClipInput { rate: 16_000, hop: 160, chunk: 100, halvings: 3, shortest: 201 };
const PIXELS: PixelInput = PixelInput {
    patch: 16,
    merge: 2,
    temporal: 2,
    shortest_edge: 1,
    longest_edge: 1 << 20,
    counted: PixelCount::PerFrame,
    positions_per_second: 25.0,
    timestamps: None,
    sound: None,
};

fn input(kind: pb::MediaKind, form: MediaForm) -> MediaInput {
    let formats = if matches!(form, MediaForm::Bytes { .. }) { vec!["wav".into()] } else { vec![] };
    let (walk, placeholder, width, max_call_tokens) = (WalkId(0), 7, 8, None);
    MediaInput { kind, walk, placeholder, form, width, formats, encoded_together: true, max_call_tokens }
}

fn inputs() -> Vec<MediaInput> {
    vec![
        input(pb::MediaKind::Audio, MediaForm::Clips(CLIPS)),
        input(pb::MediaKind::Image, MediaForm::Pixels(PIXELS)),
        input(pb::MediaKind::Video, MediaForm::Pixels(PIXELS)),
    ]
}

fn clip(samples: usize) -> pb::MediaItem {
    pb::MediaItem {
        kind: pb::MediaKind::Audio.into(),
        data: vec![0; 4 * samples].into(),
        ..Default::default()
    }
}

/// An item of pixels with a grid of patches of 16 × 16 pixels.
fn pixels(kind: pb::MediaKind, frames: usize, grid: [u32; 3]) -> pb::MediaItem {
    let [t, height, width] = grid;
    let data = vec![0; frames * 256 * (height * width) as usize * 3].into();
    let seconds_per_grid = (kind == pb::MediaKind::Video).then_some(1.0);
    let grid = Some(pb::MediaGrid { frames: t, height, width });
    pb::MediaItem { kind: kind.into(), data, grid, seconds_per_grid, ..Default::default() }
}

fn tokens(items: &[pb::MediaItem]) -> Result<Vec<u32>, String> {
    media_tokens(&inputs(), items).map_err(|error| format!("{}: {error}", error.item))
}

#[test]
fn a_clip_has_one_frame_more_beside_a_longer_one() {
    // 43.5 hops: 43 frames alone and 44 beside a longer clip.
    assert_eq!((CLIPS.frames(6_960, 6_960), CLIPS.frames(6_960, 9_000)), (43, 44));
    // 100 frames are 13 tokens, and so is each further chunk.
    let of = [0, 1, 8, 9, 99, 100, 101, 250].map(|frames| CLIPS.tokens_of_frames(frames));
    assert_eq!(of, [0, 1, 1, 2, 13, 13, 14, 33]);
    // 40 hops and a half are 40 frames, five tokens; 41 frames are six.
    assert_eq!(tokens(&[clip(6_480)]), Ok(vec![5]));
    assert_eq!(tokens(&[clip(6_480), clip(16_000)]), Ok(vec![6, 13]));
}

#[test]
fn pixels_have_the_tokens_of_their_grid() {
    let (image, video) = (pb::MediaKind::Image, pb::MediaKind::Video);
    assert_eq!(tokens(&[pixels(image, 1, [1, 4, 6]), pixels(video, 3, [2, 2, 2])]), Ok(vec![6, 2]));
    assert_eq!(tokens(&[pixels(video, 4, [2, 2, 2])]), Ok(vec![2]));
}

#[test]
fn items_that_do_not_fit_are_refused_by_field() {
    let (image, video) = (pb::MediaKind::Image, pb::MediaKind::Video);
    let with = |item: &pb::MediaItem, change: fn(&mut pb::MediaItem)| {
        let mut item = item.clone();
        change(&mut item);
        item
    };
    let picture = pixels(image, 1, [1, 4, 6]);
    let film = pixels(video, 4, [2, 2, 2]);
    for (item, words) in [
        (with(&picture, |item| item.data.clear()), "0: data: is empty"),
        (
            with(&picture, |item| item.data.truncate(9)),
            "0: data: has 9 bytes, but a frame of the grid has 18432",
        ),
        (with(&picture, |item| item.grid = None), "0: grid: is missing"),
        (with(&picture, |item| item.format = "png".into()), "0: format: is \"png\""),
        (with(&picture, |item| item.seconds_per_grid = Some(1.0)), "0: seconds_per_grid: belongs"),
        (with(&film, |item| item.seconds_per_grid = None), "0: seconds_per_grid: is missing"),
        (with(&film, |item| item.seconds_per_grid = Some(f32::NAN)), "0: seconds_per_grid: is NaN"),
        (with(&film, |item| item.seconds_per_grid = Some(0.0)), "0: seconds_per_grid: is 0"),
        (with(&film, |item| item.seconds_per_grid = Some(1e9)), "0: seconds_per_grid: is 1000000000"),
        (with(&film, |item| item.kind = 0), "0: kind: is media_kind_unspecified"),
        (pixels(video, 2, [2, 2, 2]), "0: data: has 6144 bytes"),
        (pixels(video, 5, [2, 2, 2]), "0: data: has 15360 bytes"),
        (pixels(image, 1, [2, 2, 2]), "0: grid: has 2 frames"),
        (pixels(image, 1, [1, 3, 2]), "0: grid: is 3 × 2 patches"),
        (clip(100), "0: data: is too short: it has no frame"),
        (clip(200), "0: data: is too short: a request's longest"),
        (with(&clip(999), |item| item.data.truncate(3995)), "0: data: has 3995 bytes"),
        (with(&clip(999), |item| item.grid = Some(pb::MediaGrid::default())), "0: grid: belongs to"),
    ] {
        let refused = tokens(&[item]).unwrap_err();
        assert!(refused.starts_with(words), "{refused}");
    }
    for axis in [0, u32::MAX, MAX_AXIS + 1, MAX_AXIS] {
        for grid in [[1, axis, axis], [axis, 2, 2], [1, 2, axis], [axis; 3]] {
            let [frames, height, width] = grid;
            let item = pb::MediaItem { grid: Some(pb::MediaGrid { frames, height, width }), ..film.clone() };
            let refused = tokens(&[item]).unwrap_err();
            assert!(refused.starts_with("0: grid") || refused.starts_with("0: data"), "{refused}");
        }
    }
    // Beside a longer clip, a single sample has a frame.
    assert_eq!(tokens(&[clip(16_000), picture.clone(), clip(1)]), Ok(vec![13, 6, 1]));
    assert!(tokens(&[clip(16_000), picture, clip(0)]).unwrap_err().starts_with("2: data: is empty"));
}

#[test]
fn runs_are_placeholders_of_their_own() {
    let model =
        ModelDeclaration { media: inputs(), ..ModelDeclaration::new(vec![], vec![], vec![]).unwrap() };
    let prompt = [1, 7, 7, 2, 7, 7, 7];
    let item = |runs: &[[u32; 2]]| {
        let runs = runs.iter().map(|&[first, tokens]| pb::MediaRun { first, tokens }).collect();
        pb::MediaItem { kind: pb::MediaKind::Video.into(), runs, ..Default::default() }
    };
    let check = |items: &[&[[u32; 2]]]| {
        let items: Vec<_> = items.iter().map(|runs| item(runs)).collect();
        model.check_runs(&prompt, &items).map_err(|error| format!("{}: {}", error.field(), error.problem))
    };
    assert_eq!(check(&[&[[1, 2]], &[[4, 3]]]), Ok(()));
    assert_eq!(check(&[&[[1, 1], [4, 1]], &[[2, 1], [5, 2]]]), Ok(()));
    for (items, words) in [
        (&[&[[0, 2]][..]][..], "media[0].runs[0]: begins at 0"),
        (&[&[]], "media[0].runs[0]: does not begin"),
        (&[&[[1, 0]]], "media[0].runs[0]: begins at 1"),
        (&[&[[1, 2], [3, 1]]], "media[0].runs[1]: begins at 3"),
        (&[&[[4, 1], [1, 1]]], "media[0].runs[1]: begins at 1"),
        (&[&[[4, 1]], &[[1, 1]]], "media[1].runs[0]: does not begin"),
        (&[&[[1, 2]], &[[2, 1]]], "media[1].runs[0]: begins at 2"),
        (&[&[[6, 2]]], "media[0].runs[0]: begins at 6"),
        (&[&[[u32::MAX, u32::MAX]]], "media[0].runs[0]: begins at"),
    ] {
        let refused = check(items).unwrap_err();
        assert!(refused.starts_with(words), "{refused}");
    }
}
