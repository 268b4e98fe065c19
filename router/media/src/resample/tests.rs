use super::*;

/// A tone of `seconds` at a rate.
fn tone(hertz: f64, rate: u32, seconds: f64) -> Vec<f32> {
    let count = (seconds * f64::from(rate)) as usize;
    (0..count).map(|n| (2.0 * PI * hertz * n as f64 / f64::from(rate)).sin() as f32).collect()
}

fn resampled(samples: &[f32], from: u32, piece: usize) -> Vec<f32> {
    let mut resampler = Resampler::new(from, 16_000).unwrap();
    let mut out = Vec::new();
    samples.chunks(piece).for_each(|piece| resampler.push(piece, &mut out));
    resampler.finish(&mut out);
    out
}

/// Root of the mean square in the middle, in dB of a full tone.
fn level(samples: &[f32]) -> f64 {
    let middle = &samples[samples.len() / 4..samples.len() * 3 / 4];
    let power: f64 =
        middle.iter().map(|sample| f64::from(*sample).powi(2)).sum::<f64>() / middle.len() as f64;
    10.0 * (2.0 * power + 1e-30).log10()
}

const RATES_OF_CLIENTS: [u32; 10] =
    [8000, 11_025, 12_000, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000, 192_000];

#[test]
fn tones_pass_up_to_seven_eighths_of_half_the_lower_rate() {
    for rate in RATES_OF_CLIENTS {
        let edge = f64::from(rate.min(16_000)) / 2.0 * PASSED;
        for part in [0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0] {
            let passed = level(&resampled(&tone(edge * part, rate, 0.5), rate, 1000));
            assert!(passed.abs() < 0.1, "{rate}: {} Hz at {passed} dB", edge * part);
        }
    }
}

#[test]
fn tones_above_half_the_lower_rate_are_gone() {
    for rate in RATES_OF_CLIENTS.into_iter().filter(|rate| *rate > 16_000) {
        for hertz in [8000.0, 8100.0, 8500.0, 9000.0, 10_000.0, 11_000.0] {
            if hertz < f64::from(rate) / 2.0 {
                let folded = level(&resampled(&tone(hertz, rate, 0.5), rate, 1000));
                assert!(folded < -80.0, "{rate}: {hertz} Hz at {folded} dB");
            }
        }
    }
}

#[test]
fn a_tone_keeps_its_phase_and_its_length() {
    for rate in RATES_OF_CLIENTS {
        let found = resampled(&tone(1000.0, rate, 0.5), rate, 777);
        let expected = tone(1000.0, 16_000, 0.5);
        assert!(found.len().abs_diff(expected.len()) <= 1, "{rate}: {}", found.len());
        let middle = 2000..6000;
        let differences = found[middle.clone()].iter().zip(&expected[middle]).map(|(a, b)| (a - b).abs());
        assert!(differences.fold(0.0, f32::max) < 2e-3, "{rate}");
    }
}

#[test]
fn pieces_change_no_bit_and_equal_rates_pass() {
    let noise: Vec<f32> =
        (0..5000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 8) as f32 / 8e6 - 1.0).collect();
    let whole = resampled(&noise, 44_100, noise.len());
    for piece in [1, 7, 441, 4096] {
        assert_eq!(resampled(&noise, 44_100, piece), whole);
    }
    assert_eq!(whole.len(), (5000 * 160_usize).div_ceil(441));
    assert_eq!(resampled(&noise, 16_000, 33), noise);
    assert!(resampled(&[], 48_000, 1).is_empty());
    assert_eq!(resampled(&[1.0], 48_000, 1).len(), 1);
}

#[test]
fn rates_that_no_recorder_has_are_refused() {
    for rate in [0, 1, 3999, 16_001, 44_101, 192_001, u32::MAX] {
        assert!(Resampler::new(rate, 16_000).is_none(), "{rate}");
    }
}
