use serde_json::{Value, json};

use super::*;
use crate::config::ConfigFile;

fn tables(keys: Value, layer_types: &[&str]) -> Result<RopeTables, String> {
    let file = ConfigFile::of_value(keys);
    RopeTables::read(&file.keys(), layer_types, 4096, RopeDefaults::PLAIN).map_err(|error| error.to_string())
}

fn rope(keys: Value) -> Rope {
    tables(keys, &["full_attention"]).unwrap().tables.remove(0)
}

/// Compares the frequencies and the scale of a head of 32 elements with those of transformers 5.23.0.
fn agrees<const N: usize>(keys: Value, scale: f32, expected: [f32; N]) {
    let found = rope(keys).frequencies(32).unwrap();
    assert!((found.scale - scale).abs() < 1e-6, "{} {scale}", found.scale);
    for (found, expected) in found.inverse.iter().zip(expected) {
        assert!((found / expected - 1.0).abs() < 1e-6, "{found} {expected}");
    }
    assert_eq!(found.inverse.len(), N);
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
fn llama3_agrees_with_the_reference() {
    let keys = |changes: Value| {
        let mut scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                 "high_freq_factor": 4.0, "original_max_position_embeddings": 64});
        scaling.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        json!({"rope_theta": 5e5, "rope_scaling": scaling})
    };
    agrees(
        keys(json!({})),
        1.0,
        [
            1.0,
            0.4403666,
            0.07940301,
            0.01067464,
            0.004700754,
            0.002070055,
            0.0009115831,
            0.0004014308,
            0.0001767767,
            7.784655e-05,
            3.428102e-05,
            1.509622e-05,
            6.64787e-06,
            2.9275e-06,
            1.289173e-06,
            5.677088e-07,
        ],
    );
    // `max_position_embeddings` of a Llama 3 config already includes the scaling.
    assert_eq!(tables(keys(json!({})), &["full_attention"]).unwrap().max_context(4096), 4096);
    for (changes, key) in [
        (json!({"factor": null}), "factor"),
        (json!({"low_freq_factor": 0.0}), "low_freq_factor"),
        (json!({"high_freq_factor": 1.0}), "high_freq_factor"),
        (json!({"original_max_position_embeddings": -1}), "original_max_position_embeddings"),
    ] {
        let error = tables(keys(changes), &["full_attention"]).unwrap_err();
        assert!(error.contains(&format!("rope_scaling.{key}: ")), "{error}");
    }
}

#[test]
fn partial_rotation_has_the_frequencies_of_a_smaller_head() {
    let keys = |factor: f64| json!({"rope_theta": 1e4, "partial_rotary_factor": factor});
    let half = [1.0, 0.316_227_76, 0.1, 0.031_622_78, 0.01, 0.003_162_277_7, 0.001, 0.000_316_227_77];
    agrees(keys(0.5), 1.0, half);
    assert_eq!(rope(keys(0.5)).rotated(32), 16);
    // The number of rotated elements is rounded down to an even number.
    assert_eq!(rope(keys(0.3)).rotated(32), 8);
    let inside = json!({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}});
    assert_eq!(rope(inside), rope(keys(0.5)));
    for wrong in [0.0, -1.0, 1.01] {
        let error = tables(keys(wrong), &["full_attention"]).unwrap_err();
        assert!(error.contains("partial_rotary_factor"), "{error}");
    }
}

#[test]
fn yarn_over_a_part_of_a_head_agrees_with_the_reference() {
    let yarn = |factor: f64| {
        json!({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "partial_rotary_factor": factor,
               "factor": 4.0, "original_max_position_embeddings": 64}})
    };
    agrees(yarn(0.25), 1.138_629_4, [1.0, 0.007_905_695, 0.000_25, 7.905_694e-6]);
    agrees(
        yarn(0.5),
        1.138_629_4,
        [
            1.0,
            0.111_142_464,
            0.007_905_695,
            0.001_405_853_3,
            0.000_25,
            4.445_698_5e-5,
            7.905_694e-6,
            1.405_853_4e-6,
        ],
    );
}

/// Compares with the axes of Qwen2-VL (in sections) and Qwen3.5 (interleaved) in transformers. The expected axes were
/// derived from the cosines that transformers computes for the positions 5, 100 and 9 on the three axes.
#[test]
fn sections_divide_the_frequencies_among_the_axes() {
    let axes = |keys: Value| rope(keys).axes(16);
    let sections = json!({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}});
    assert_eq!(axes(sections), Ok(vec![0, 0, 1, 1, 1, 2, 2, 2]));
    let interleaved = |section: [usize; 3]| json!({"rope_parameters": {"rope_type": "default", "mrope_section": section, "mrope_interleaved": true}});
    assert_eq!(axes(interleaved([3, 3, 2])), Ok(vec![0, 1, 2, 0, 1, 2, 0, 1]));
    assert_eq!(axes(interleaved([6, 1, 1])), Ok(vec![0, 1, 2, 0, 0, 0, 0, 0]));
    assert_eq!(axes(json!({"rope_theta": 1e4})), Ok(vec![0; 8]));
    let error = axes(interleaved([3, 3, 3])).unwrap_err();
    assert!(error.contains("mrope_section") && error.contains("8 frequencies"), "{error}");
    // Qwen3.5: a quarter of a head of 256 elements.
    let qwen = json!({"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "mrope_interleaved": true,
                      "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25}});
    let found = rope(qwen).axes(256).unwrap();
    assert_eq!((found.len(), found[30], found[31]), (32, 0, 1));
}

#[test]
fn divisors_divide_each_frequency() {
    let of = |divisors: Value| {
        rope(json!({"rope_theta": 1e4, "rope_scaling": {"rope_type": "divisors", "divisors": divisors}}))
    };
    let plain = rope(json!({"rope_theta": 1e4})).frequencies(8).unwrap();
    let found = of(json!([1.0, 1.5, 4, 8.0])).frequencies(8).unwrap();
    for (i, by) in [1.0, 1.5, 4.0, 8.0].into_iter().enumerate() {
        assert!((found.inverse[i] * by / plain.inverse[i] - 1.0).abs() < 1e-6, "{:?}", found.inverse);
    }
    assert_eq!((found.axes, found.scale), (plain.axes, 1.0));
    let error = of(json!([1.0, 1.5])).frequencies(8).unwrap_err();
    assert!(error.contains("divisors") && error.contains("4 frequencies"), "{error}");
    for divisors in [json!([1.0, 0.0]), json!([-1.0]), json!(8.0), json!(["8"])] {
        let keys = json!({"rope_scaling": {"rope_type": "divisors", "divisors": divisors}});
        let error = tables(keys, &["full_attention"]).unwrap_err();
        assert!(error.contains("rope_scaling.divisors"), "{error}");
    }
    let missing =
        tables(json!({"rope_scaling": {"rope_type": "divisors"}}), &["full_attention"]).unwrap_err();
    assert!(missing.contains("divisors"), "{missing}");
}

#[test]
fn types_of_layers_have_tables_of_their_own() {
    // The keys of Gemma 3, as transformers 5 writes them.
    let keys = json!({"rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    }});
    let (slide, full) = ("sliding_attention", "full_attention");
    let found = tables(keys.clone(), &[slide, slide, full, slide]).unwrap();
    assert_eq!(found.of_layer, [0, 0, 1, 0]);
    assert_eq!(found.tables, [rope(json!({"rope_theta": 1e4})), rope(json!({"rope_theta": 1e6}))]);
    let error = tables(keys, &["linear_attention"]).unwrap_err();
    assert!(error.contains("linear_attention") && error.contains("full_attention"), "{error}");

    let set = json!({"rope_type": "default", "rope_theta": 5e5});
    let alike = tables(json!({"rope_parameters": {full: set, slide: set}}), &[full, slide]).unwrap();
    assert_eq!((alike.of_layer, alike.tables), (vec![0, 0], vec![rope(json!({"rope_theta": 5e5}))]));
}
