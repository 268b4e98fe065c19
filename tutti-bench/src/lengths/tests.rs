use super::*;

fn drawn(text: &str) -> Vec<u32> {
    let lengths: Lengths = text.parse().unwrap();
    assert_eq!(lengths.to_string(), text);
    let mut draw = Draw::new(3);
    let mut drawn: Vec<u32> = (0..20_000).map(|_| lengths.draw(&mut draw)).collect();
    drawn.sort_unstable();
    drawn
}

#[test]
fn lengths_follow_their_distributions() {
    assert!(drawn("17").iter().all(|length| *length == 17));
    let uniform = drawn("3:6");
    for length in 3..=6 {
        let share = uniform.iter().filter(|drawn| **drawn == length).count();
        assert!(share.abs_diff(5_000) < 300, "{length} was drawn {share} times");
    }
    assert_eq!((uniform[0], uniform[19_999]), (3, 6));
    let normal = drawn("normal:1000:100:5000");
    assert!(normal[10_000].abs_diff(1000) < 10, "median {}", normal[10_000]);
    // 84.13 % of a normal distribution lie below the mean plus one deviation.
    assert!(normal[16_826].abs_diff(1100) < 10, "84th percentile {}", normal[16_826]);
    let lognormal = drawn("lognormal:200:1:1000");
    assert!(lognormal[10_000].abs_diff(200) < 8, "median {}", lognormal[10_000]);
    assert!(lognormal[16_826].abs_diff(544) < 30, "84th percentile {}", lognormal[16_826]);
    assert_eq!(lognormal[19_999], 1000);
    assert_eq!(drawn("normal:2:50:9")[0], 1);
}

#[test]
fn a_wrong_form_is_refused_with_its_value() {
    for (text, why) in [
        ("0", "N must be from 1 to 10000000 tokens, and is 0"),
        ("9:8", "MIN is 9, which is over MAX, 8"),
        ("9:x", "MAX must be from 1 to 10000000 tokens, and is x"),
        ("normal:0:1:9", "MEAN must be a number over 0, and is 0"),
        ("lognormal:5:inf:9", "SIGMA must be a number over 0, and is inf"),
        ("normal:5", "must be N, MIN:MAX,"),
        ("many", "must be N, MIN:MAX,"),
        ("", "N must be from 1"),
    ] {
        let error = text.parse::<Lengths>().unwrap_err();
        assert!(error.contains(why), "{text}: {error}");
    }
}
