use tutti_proto::declaration::SoundSentinels;

use super::{Stream::*, *};

fn runs(grid: [u32; 3], fps: f64, sound: u32) -> Vec<(Stream, u32)> {
    let [frames, height, width] = grid;
    let grid = Some(pb::MediaGrid { frames, height, width });
    let turns = Turns {
        sentinels: SoundSentinels { begin: 1, end: 2 },
        seconds_per_patch: 2.0 / fps,
        positions_per_second: 13.0,
    };
    turns.runs(&pb::MediaItem { grid, ..Default::default() }, frames * height * width / 4, sound)
}

/// The runs of each case are those of transformers' processor, with two frames per patch.
#[test]
fn frames_and_sound_are_in_the_order_of_their_times() {
    let four = [(Video, 4), (Sound, 7), (Video, 4), (Sound, 6), (Video, 4), (Sound, 7)];
    assert_eq!(runs([3, 4, 4], 4.0, 20), four);
    assert_eq!(runs([1, 40, 4], 20.0 / 3.0, 8), [(Video, 40), (Sound, 8)]);
    assert_eq!(
        runs([4, 4, 4], 2.0, 10),
        [(Video, 4), (Sound, 10), (Video, 12)],
        "sound is over before frames"
    );
    let each = [(Video, 2), (Sound, 1), (Video, 2), (Sound, 1), (Video, 2), (Sound, 4)];
    assert_eq!(runs([3, 2, 4], 26.0, 6), each, "a patch is in front of the sound of the same time");
    assert_eq!(runs([3, 2, 2], 1000.0, 2), [(Video, 1), (Sound, 1), (Video, 2), (Sound, 1)]);
    let steady = runs([8, 2, 2], 0.7, 270);
    let of_sound: Vec<u32> = steady.iter().filter(|run| run.0 == Sound).map(|run| run.1).collect();
    // In f32, the last patch would be behind its sound.
    assert_eq!(of_sound, [38, 37, 37, 37, 37, 37, 37, 10]);
}

#[test]
fn all_tokens_have_a_turn_whatever_the_times() {
    for fps in [1e-3, 0.3, 1.0, 24.0, 1000.0] {
        for sound in [1, 13, 4096] {
            let runs = runs([7, 4, 6], fps, sound);
            let of = |stream| runs.iter().filter(|run| run.0 == stream).map(|run| run.1).sum::<u32>();
            assert_eq!((of(Video), of(Sound)), (42, sound));
            assert_eq!(runs[0].0, Video, "positions need frames in front of their sound");
            assert!(runs.iter().all(|run| run.1 > 0) && runs.windows(2).all(|pair| pair[0].0 != pair[1].0));
        }
    }
}
