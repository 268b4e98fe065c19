use serde_json::json;

use super::*;

fn rope(keys: Value) -> Rope {
    serde_json::from_value::<RopeKeys>(keys).unwrap().resolve(4096).unwrap()
}

/// Compares the frequencies and the scale of a head of 32 with those of transformers 5.23.0.
fn agrees(keys: Value, scale: f32, expected: [f32; 16]) {
    let found = rope(keys).frequencies(32);
    assert!((found.scale - scale).abs() < 1e-6, "{} {scale}", found.scale);
    for (found, expected) in found.inverse.iter().zip(expected) {
        assert!((found / expected - 1.0).abs() < 1e-6, "{found} {expected}");
    }
    assert_eq!(found.inverse.len(), 16);
}

#[test]
fn plain_frequencies_agree_with_the_reference() {
    agrees(
        json!({"rope_theta": 1e6, "rope_scaling": null}),
        1.0,
        [
            1.0,
            0.4216965,
            0.1778279,
            0.07498942,
            0.03162278,
            0.01333521,
            0.005623413,
            0.002371374,
            0.001,
            0.0004216965,
            0.0001778279,
            7.498942e-05,
            3.162277e-05,
            1.333521e-05,
            5.623413e-06,
            2.371374e-06,
        ],
    );
}

#[test]
fn yarn_agrees_with_the_reference() {
    agrees(
        json!({"rope_theta": 1e6,
               "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}),
        1.138_629_4,
        [
            1.0,
            0.3162724,
            0.08891397,
            0.01874735,
            0.007905695,
            0.003333804,
            0.001405853,
            0.0005928435,
            0.00025,
            0.0001054241,
            4.445699e-05,
            1.874736e-05,
            7.905694e-06,
            3.333804e-06,
            1.405853e-06,
            5.928434e-07,
        ],
    );
}

#[test]
fn yarn_without_truncation_and_with_other_betas_agrees_with_the_reference() {
    agrees(
        json!({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "beta_fast": 16,
               "original_max_position_embeddings": 64, "truncate": false, "beta_slow": 2}}),
        1.138_629_4,
        [
            1.0,
            0.2539353,
            0.04445698,
            0.01874735,
            0.007905695,
            0.003333804,
            0.001405853,
            0.0005928435,
            0.00025,
            0.0001054241,
            4.445699e-05,
            1.874736e-05,
            7.905694e-06,
            3.333804e-06,
            1.405853e-06,
            5.928434e-07,
        ],
    );
}

#[test]
fn yarn_with_mscale_agrees_with_the_reference() {
    agrees(
        json!({"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.3,
               "original_max_position_embeddings": 512}}),
        0.901_784,
        [
            1.0,
            0.5623413,
            0.2766993,
            0.133371,
            0.0625,
            0.02811706,
            0.01185854,
            0.004445699,
            0.00125,
            0.0007029267,
            0.0003952847,
            0.0002222849,
            0.000125,
            7.029266e-05,
            3.952847e-05,
            2.222849e-05,
        ],
    );
}

#[test]
fn yarn_over_the_whole_context_with_a_given_attention_factor_agrees_with_the_reference() {
    agrees(
        json!({"rope_theta": 1e6,
               "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.25}}),
        1.25,
        [
            1.0,
            0.4216965,
            0.1778279,
            0.07498942,
            0.0284605,
            0.01066817,
            0.003936389,
            0.001422824,
            0.0005,
            0.0002108482,
            8.891397e-05,
            3.749471e-05,
            1.581139e-05,
            6.667607e-06,
            2.811707e-06,
            1.185687e-06,
        ],
    );
}

#[test]
fn sets_nested_by_kind_of_layer_must_agree() {
    let set = json!({"rope_type": "default", "rope_theta": 5e5});
    let nested =
        |other: Value| json!({"rope_parameters": {"full_attention": set, "sliding_attention": other}});
    assert_eq!(rope(nested(set.clone())), rope(json!({"rope_theta": 5e5})));
    let different: RopeKeys = serde_json::from_value(nested(json!({"rope_theta": 1e4}))).unwrap();
    assert!(different.resolve(4096).unwrap_err().contains("rotate differently"));
}
