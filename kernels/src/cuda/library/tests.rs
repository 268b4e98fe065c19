use super::{Missing, folders, gpus};

#[test]
fn the_folders_that_were_searched_are_named() {
    assert!(folders(None).starts_with("LD_LIBRARY_PATH (empty), the loader's cache"));
    assert!(folders(Some("/opt/a:/opt/b".into())).contains("(/opt/a:/opt/b)"));
}

/// On a machine without CUDA, checks the error's text. On a machine with CUDA, checks that the call succeeds.
#[test]
fn a_machine_without_cuda_learns_what_is_missing() {
    match gpus() {
        Ok(count) => assert!(count > 0),
        Err(missing @ Missing::Library { .. }) => {
            let text = missing.to_string();
            assert!(
                text.contains("lib") && text.contains(".so.") && text.contains("LD_LIBRARY_PATH"),
                "{text}"
            );
        }
        Err(Missing::Gpu(why)) => assert!(!why.is_empty()),
        Err(Missing::Symbol { symbol, .. }) => assert!(!symbol.is_empty()),
    }
}
