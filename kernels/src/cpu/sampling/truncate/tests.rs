use super::*;
use crate::cpu::testing::Random;

/// Returns the ids of the kept candidates. This reference sorts all candidates.
fn kept_by_sorting(weights: &[f32], top_k: usize, top_p: f32) -> Vec<usize> {
    let mut order: Vec<usize> = (0..weights.len()).filter(|&id| weights[id] > 0.0).collect();
    order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]).then(a.cmp(&b)));
    if top_k > 0 {
        order.truncate(top_k);
    }
    if top_p < 1.0 {
        let wanted = order.iter().map(|&id| f64::from(weights[id])).sum::<f64>() * f64::from(top_p);
        let mut mass = 0.0;
        let fewer = order.iter().take_while(|&&id| {
            let short = mass < wanted;
            mass += f64::from(weights[id]);
            short
        });
        let fewer = fewer.count().max(1);
        order.truncate(fewer);
    }
    order.sort_unstable();
    order
}

#[test]
fn selection_agrees_with_sorting() {
    let mut random = Random::new(3);
    let mut scratch = Scratch::default();
    for round in 0..400 {
        let len = 1 + random.below(600);
        let spread = [0.0, 0.3, 2.0, 20.0][round % 4];
        let mut weights: Vec<f32> = random.normals(len, spread).iter().map(|x| (-x.abs()).exp()).collect();
        // Rounding makes ties. Some weights are zeros, which are no candidates.
        weights.iter_mut().for_each(|x| *x = (*x * 64.0).ceil() / 64.0);
        weights.iter_mut().step_by(7).for_each(|x| *x = 0.0);
        weights[len / 2] = 1.0;
        let top_k = [0, 1, 2, 5, 40, 10_000][random.below(6)];
        // With these values of top_p, no cut falls exactly on a candidate, so rounding does not decide.
        let top_p = [1.0, 0.901_7, 0.503_1, 0.000_1][random.below(4)];
        let kept: Vec<usize> = match cut(&weights, top_k, top_p, &mut scratch) {
            Some(cut) => {
                (0..len).filter(|&id| weights[id] > 0.0 && cut.keeps(weights[id], id as u32)).collect()
            }
            None => (0..len).filter(|&id| weights[id] > 0.0).collect(),
        };
        assert_eq!(kept, kept_by_sorting(&weights, top_k, top_p), "round {round}: {top_k} {top_p}");
    }
}
