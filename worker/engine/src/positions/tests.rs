#![allow(clippy::single_range_in_vec_init, reason = "an item may have one run")]

use std::{collections::BTreeMap, fs, path::PathBuf};

use safetensors::SafeTensors;

use super::*;

/// Ids of the placeholders in the goldens' prompts.
const AUDIO: i64 = 300;
const IMAGE: i64 = 301;
const VIDEO: i64 = 302;
/// `position_id_per_seconds` of the golden models.
const PER_SECOND: f32 = 13.0;
/// Patches per token in each direction.
const MERGE: usize = 2;

fn sound(runs: &[Range<usize>]) -> Item {
    Item { kind: Kind::Line, runs: runs.to_vec() }
}

fn frames(grid: [usize; 2], seconds: f32, runs: &[Range<usize>]) -> Item {
    let grid = Grid::new(grid, seconds, PER_SECOND).unwrap();
    Item { kind: Kind::Grid(grid), runs: runs.to_vec() }
}

fn all(prompt: usize, items: &[Item]) -> Vec<Axes> {
    let positions = Positions::new(prompt, items);
    (0..prompt + 3).map(|index| positions.at(index)).collect()
}

#[test]
fn text_and_sound_are_counted() {
    let plain: Vec<Axes> = (0..12).map(|index| [index as f32; 3]).collect();
    assert_eq!(all(9, &[]), plain);
    assert_eq!(all(9, &[sound(&[2..5]), sound(&[7..9])]), plain);
    assert_eq!(Positions::default().at(4), [4.0; 3]);
}

#[test]
fn a_grid_without_tokens_is_none() {
    for sides in [[0, 3], [3, 0], [0, 0], [usize::MAX, 2]] {
        assert_eq!(Grid::new(sides, 0.0, PER_SECOND), None);
    }
}

#[test]
fn a_picture_takes_as_many_positions_as_its_longer_side() {
    let found = all(10, &[frames([2, 3], 0.0, &[2..8])]);
    let grid =
        [[2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4]].map(|at| at.map(|at| at as f32));
    assert_eq!(found[2..8], grid);
    assert_eq!(found[8..], [[5.0; 3], [6.0; 3], [7.0; 3], [8.0; 3], [9.0; 3]]);
}

/// The text behind a video with sound continues from the longer stream, and what is generated from the largest
/// position.
#[test]
fn text_behind_a_tall_video_continues_from_its_sound() {
    let items = [frames([20, 2], 0.0, &[5..45]), sound(&[45..53])];
    let found = all(60, &items);
    assert_eq!(found[44], [5.0, 24.0, 6.0]);
    assert_eq!((found[45], found[52]), ([5.0; 3], [12.0; 3]));
    assert_eq!(found[53..60], [13.0, 14.0, 15.0, 16.0, 17.0, 18.0, 19.0].map(|at| [at; 3]));
    assert_eq!(found[60..], [25.0, 26.0, 27.0].map(|at| [at; 3]));
}

struct Goldens<'a>(SafeTensors<'a>);

impl Goldens<'_> {
    fn bytes<const N: usize>(&self, name: &str) -> Vec<[u8; N]> {
        self.0.tensor(name).map_or(Vec::new(), |tensor| tensor.data().as_chunks().0.to_vec())
    }

    fn integers(&self, name: &str) -> Vec<i64> {
        self.bytes(name).into_iter().map(i64::from_le_bytes).collect()
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        self.bytes(name).into_iter().map(f32::from_le_bytes).collect()
    }
}

/// Returns the items of a golden case. `per_frame` is true if each frame is an item.
fn items(goldens: &Goldens<'_>, case: &str, ids: &[i64], per_frame: bool) -> Vec<Item> {
    let mut of_token: BTreeMap<i64, Vec<usize>> = BTreeMap::new();
    ids.iter().enumerate().for_each(|(index, id)| of_token.entry(*id).or_default().push(index));
    let runs = |indices: &[usize]| {
        let mut runs: Vec<Range<usize>> = Vec::new();
        for &index in indices {
            match runs.last_mut().filter(|run| run.end == index) {
                Some(run) => run.end += 1,
                None => runs.push(index..index + 1),
            }
        }
        runs
    };
    let mut items = Vec::new();
    let seconds = goldens.floats(&format!("{case}.second_per_grid"));
    for (id, kind) in [(IMAGE, "image"), (VIDEO, "video")] {
        let mut left = &of_token.remove(&id).unwrap_or_default()[..];
        let grids = goldens.integers(&format!("{case}.{kind}_grid_thw"));
        for (video, grid) in grids.as_chunks::<3>().0.iter().enumerate() {
            let [count, height, width] = grid.map(|size| size as usize);
            let (height, width) = (height / MERGE, width / MERGE);
            let times = if per_frame { vec![1; count] } else { vec![count] };
            for count in times {
                let (own, rest) = left.split_at(count * height * width);
                let seconds = if id == VIDEO { seconds.get(video).copied().unwrap_or(0.0) } else { 0.0 };
                items.push(frames([height, width], seconds, &runs(own)));
                left = rest;
            }
        }
        assert!(left.is_empty(), "{case}: tokens of no grid");
    }
    let sounds = of_token.remove(&AUDIO).unwrap_or_default();
    match case {
        "audio_in_video" => items.push(sound(&runs(&sounds))),
        _ => items.extend(runs(&sounds).iter().map(|run| sound(std::slice::from_ref(run)))),
    }
    items
}

/// Positions have the bits of those that transformers computes.
#[test]
fn positions_are_those_of_transformers() {
    let Some(root) = std::env::var_os("GOLDEN_MODELS").map(PathBuf::from) else {
        eprintln!("skipped: GOLDEN_MODELS is not set");
        return;
    };
    let omni = ["audio", "audio_short", "image", "video", "mixed", "audio_in_video", "tall_video"];
    let vl = ["image", "images_video"];
    for (model, cases) in [
        ("qwen3_omni", &omni[..]),
        ("qwen3_vl", &vl),
        ("qwen3_vl_moe", &vl),
        ("qwen3_5", &vl),
        ("qwen3_5_moe", &vl),
    ] {
        let bytes = fs::read(root.join(model).join("goldens.safetensors")).unwrap();
        let goldens = Goldens(SafeTensors::deserialize(&bytes).unwrap());
        for case in cases {
            let ids = goldens.integers(&format!("{case}.input_ids"));
            let items = items(&goldens, case, &ids, model != "qwen3_omni");
            let positions = Positions::new(ids.len(), &items);
            let expected = goldens.floats(&format!("{case}.position_ids"));
            for index in 0..ids.len() {
                let of_axis = |axis: usize| expected[axis * ids.len() + index].to_bits();
                let found = positions.at(index).map(f32::to_bits);
                assert_eq!(found, [0, 1, 2].map(of_axis), "{model} {case}: token {index}");
            }
            let [delta] = goldens.floats(&format!("{case}.rope_delta"))[..] else {
                panic!("{case}: no delta")
            };
            assert_eq!(positions.delta.to_bits(), delta.to_bits(), "{model} {case}");
            let next = positions.at(ids.len());
            assert_eq!(next, [ids.len() as f32 + delta; 3], "{model} {case}");
        }
    }
}
