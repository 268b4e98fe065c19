use super::*;
use crate::cpu::simd::isa::testable;
use crate::cpu::testing::Random;

#[test]
fn scores_are_those_of_a_log_softmax_in_double_precision() {
    for isa in testable("score") {
        let path = Path::new(isa).unwrap();
        for len in [1, 15, 16, 17, 1000, 5003] {
            let mut logits = Random::new(len as u64).normals(len, 4.0);
            // Rounding makes ties, some of them at the end of the list.
            logits.iter_mut().for_each(|x| *x = (*x * 8.0).round() / 8.0);
            let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
            let mut order: Vec<usize> = (0..len).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
            let token = order[len / 3];
            let got = score(path, &logits, token as u32, 7).unwrap();
            let want = (f64::from(logits[token]) - sum.ln()) as f32;
            assert!((got.logprob - want).abs() < 2e-6, "{isa} {len}: {} {want}", got.logprob);
            assert_eq!(got.rank as usize, 1 + logits.iter().filter(|&&x| x > logits[token]).count());
            let ids: Vec<usize> = got.top.iter().map(|&(id, _)| id as usize).collect();
            assert_eq!(ids, order[..7.min(len)], "{isa} {len}");
            for (id, logprob) in got.top {
                let want = (f64::from(logits[id as usize]) - sum.ln()) as f32;
                assert!((logprob - want).abs() < 2e-6);
            }
        }
    }
}

#[test]
fn garbage_is_refused() {
    for isa in testable("garbage") {
        let path = Path::new(isa).unwrap();
        for (garbage, at) in [(f32::NAN, 0), (f32::NAN, 40), (f32::INFINITY, 3)] {
            let mut logits = vec![1.0; 41];
            logits[at] = garbage;
            assert!(matches!(score(path, &logits, 1, 0), Err(DeviceError::NotFinite(_))), "{isa} {garbage}");
        }
        assert!(matches!(score(path, &[f32::NEG_INFINITY; 5], 1, 0), Err(DeviceError::NotFinite(_))));
        assert!(matches!(score(path, &[0.0; 5], 5, 0), Err(DeviceError::Misuse(_))));
    }
}
