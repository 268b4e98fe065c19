//! A cache file of packed weights. Later starts map the file instead of packing the weights again, and all processes of
//! a machine share its pages.
//!
//! The first page names the file's contents. Entries follow in the order of loading. An entry is a matrix, or the
//! corrections or the screen of the LM head that precedes it. Each entry consists of one page that describes it and of
//! its bytes, padded to whole pages. The file is written under a temporary name and renamed when it is complete. An
//! entry is only used if its description (kind, shape, type, and a hash of a few samples of the source bytes) matches
//! the weights that are being loaded.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::OFlags;
use rustix::process::geteuid;

use crate::DeviceError;
use crate::cpu::memory::fused_matrices::{FusedMatrices, Shape};
use crate::cpu::memory::weights::{Packing, Weights};
use crate::cpu::quant::block_float::{Corrections, Marks};
use crate::cpu::quant::grouped::FusedRows;
use crate::cpu::quant::int8::Screen;
use crate::cpu::simd::isa;
use crate::cpu::threads::pool::ThreadPool;

/// Version of the packed panels' layouts and of the file's layout. A change of either layout increments the version.
const VERSION: u32 = 6;
const PAGE: u64 = 4096;
/// Number of samples per source matrix.
const SAMPLES: usize = 4;
/// Bytes per sample.
const SAMPLE: usize = 64;

/// A file of packed weights that is being mapped or written.
#[derive(Clone)]
pub struct PackedWeights(Arc<Mutex<State>>);

/// How the file of packed weights was used when the weights were loaded.
#[derive(Debug, PartialEq, Eq)]
pub enum PackedOutcome {
    /// All weights were mapped from the file.
    Mapped,
    /// The file was written for later starts.
    Written,
    /// The file was not used, for this reason.
    Unused(String),
}

struct State {
    path: PathBuf,
    name: Page,
    mode: Mode,
}

enum Mode {
    /// `at` is the offset in bytes of the next entry's description.
    Mapping {
        file: File,
        at: u64,
    },
    Writing {
        file: File,
        partial: PathBuf,
        at: u64,
    },
    Unused(String),
}

type Page = [u8; PAGE as usize];

impl PackedWeights {
    /// Opens the file in `dir` for the weights that `key` names. `key` identifies the checkpoint and everything else,
    /// apart from the matrices themselves, that determines the packed bytes. If there is no complete file, the file
    /// will be written if possible.
    pub fn open(dir: &Path, key: &str) -> Self {
        let mut hasher = DefaultHasher::new();
        (VERSION, env!("CARGO_PKG_VERSION"), key).hash(&mut hasher);
        let path = dir.join(format!("tutti-packed-{:016x}.bin", hasher.finish()));
        let name = page(&format!("tutti packed weights {VERSION}\n{key}\n"));
        let mode = match open_own(File::options().read(true), &path)
            .and_then(|file| Ok((is_whole(&file, &name)?, file)))
        {
            Ok((true, file)) => Mode::Mapping { file, at: PAGE },
            _ => match begin(&path) {
                Ok((file, partial)) => Mode::Writing { file, partial, at: PAGE },
                Err(why) => Mode::Unused(why),
            },
        };
        Self(Arc::new(Mutex::new(State { path, name, mode })))
    }

    /// Returns the packed matrix of `source`: from the cache file if it holds the matrix, else from `pack`. While a new
    /// cache file is being made, the result of `pack` is also appended to that file.
    pub(in crate::cpu) fn matrix(
        &self,
        source: FusedMatrices<'_>,
        packing: Packing,
        pack: impl FnOnce() -> Result<Weights, DeviceError>,
    ) -> Result<Weights, DeviceError> {
        let shape = source.shape;
        let described = describe(&format!("matrix {packing:?}"), source);
        let kind = (described, Weights::len_packed(shape, packing));
        let map = |_, file: &File, from| Weights::mapped(file, from, shape, packing);
        self.entry(&[kind], map, pack, |weights| (0, weights.packed()))
    }

    /// Returns the packed matrix of `source`, which the checkpoint stores quantised, in the same way as
    /// [`Self::matrix`].
    pub(in crate::cpu) fn quantised(
        &self,
        source: FusedRows<'_>,
        pack: impl FnOnce() -> Result<Weights, DeviceError>,
    ) -> Result<Weights, DeviceError> {
        let FusedRows { shape, layout, .. } = source;
        let Shape { outputs, inputs, paired } = shape;
        let (packing, samples) = (Packing::Grouped(layout), source.fingerprint());
        let described = page(&format!("quantised {layout:?} {outputs} x {inputs} {paired} {samples:016x}\n"));
        let kind = (described, Weights::len_packed(shape, packing));
        let map = |_, file: &File, from| Weights::mapped(file, from, shape, packing);
        self.entry(&[kind], map, pack, |weights| (0, weights.packed()))
    }

    /// Returns the corrections of the table of embeddings `source`, in the same way as [`Self::matrix`] returns the
    /// table. The corrections are two entries, first the marks and then the values, because the number of values
    /// follows from the marks.
    pub(in crate::cpu) fn corrections(
        &self,
        path: isa::Path,
        pool: &mut ThreadPool,
        source: FusedMatrices<'_>,
    ) -> Result<Corrections, DeviceError> {
        let shape = source.shape;
        let kind = (describe("marks of corrections", source), Marks::len(shape));
        let map = |_, file: &File, from| Marks::mapped(file, from, shape);
        let marks =
            self.entry(&[kind], map, || Marks::find(path, pool, source), |marks| (0, marks.bytes()))?;
        let len = marks.count().and_then(|count| count.checked_mul(size_of::<u16>()));
        let kind = (describe("values of corrections", source), len);
        let map = |_, file: &File, from| marks.mapped_values(file, from);
        let values = self.entry(&[kind], map, || marks.values(pool, source), |values| (0, values.bytes()))?;
        Ok(Corrections::new(marks, values))
    }

    /// Returns the screen of the LM head `source`, in the same way as [`Self::matrix`] returns the head. If the head
    /// has no screen, an entry of the file records this, too.
    pub(in crate::cpu) fn screen(
        &self,
        source: FusedMatrices<'_>,
        pack: impl FnOnce() -> Result<Option<Screen>, DeviceError>,
    ) -> Result<Option<Screen>, DeviceError> {
        let shape = source.shape;
        let kinds =
            [(describe("screen", source), Screen::len(shape)), (describe("no screen", source), Some(0))];
        let map = |kind, file: &File, from| match kind {
            0 => Screen::mapped(file, from, shape),
            _ => Ok(None),
        };
        self.entry(&kinds, map, pack, |screen| match screen {
            Some(screen) => (0, screen.packed()),
            None => (1, &[]),
        })
    }

    /// Returns the next entry. `kinds` holds the possible descriptions of the entry, each with the entry's size in
    /// bytes. `map` maps an entry of one of these kinds, `pack` makes a new entry, and `packed` returns the new entry's
    /// kind and bytes.
    fn entry<T>(
        &self,
        kinds: &[(Page, Option<usize>)],
        map: impl FnOnce(usize, &File, u64) -> Result<T, DeviceError>,
        pack: impl FnOnce() -> Result<T, DeviceError>,
        packed: impl FnOnce(&T) -> (usize, &[u8]),
    ) -> Result<T, DeviceError> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let State { path: file_path, mode, .. } = &mut *state;
        if let Mode::Mapping { file, at } = mode {
            let mut page = [0; PAGE as usize];
            let read = file.read_exact_at(&mut page, *at).is_ok();
            let kind = kinds.iter().position(|(described, _)| read && page == *described);
            match kind.and_then(|kind| Some((kind, kinds[kind].1?))) {
                Some((kind, len)) => {
                    let from = *at + PAGE;
                    *at = from + filled(len as u64);
                    return map(kind, file, from);
                }
                None => {
                    // The file is removed so that the next start writes a new one.
                    let _ = fs::remove_file(&*file_path);
                    let why = format!("{} is of other weights, and was removed", file_path.display());
                    *mode = Mode::Unused(why);
                }
            }
        }
        let made = pack()?;
        if let Mode::Writing { file, partial, at } = mode {
            let (kind, bytes) = packed(&made);
            if let Err(error) = append(file, at, &kinds[kind].0, bytes) {
                let why = format!("{} cannot be written: {error}", partial.display());
                let _ = fs::remove_file(&*partial);
                *mode = Mode::Unused(why);
            }
        }
        Ok(made)
    }

    /// True if matrices are mapped from the file.
    pub(in crate::cpu) fn is_mapped(&self) -> bool {
        matches!(self.0.lock().unwrap_or_else(PoisonError::into_inner).mode, Mode::Mapping { .. })
    }

    /// Completes the file after all weights are loaded: a file that was written gets its final name.
    pub fn finish(&self) -> PackedOutcome {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let State { path, name, mode } = &mut *state;
        match mode {
            Mode::Mapping { .. } => PackedOutcome::Mapped,
            Mode::Unused(why) => PackedOutcome::Unused(why.clone()),
            Mode::Writing { file, partial, at } => {
                name[PAGE as usize - 8..].copy_from_slice(&at.to_le_bytes());
                let named = file
                    .write_all_at(name, 0)
                    .and_then(|()| file.sync_all())
                    .and_then(|()| fs::rename(&*partial, &*path));
                match named {
                    Ok(()) => PackedOutcome::Written,
                    Err(error) => {
                        let _ = fs::remove_file(&*partial);
                        PackedOutcome::Unused(format!("{} cannot be written: {error}", path.display()))
                    }
                }
            }
        }
    }
}

/// Returns the description of an entry of this kind that is packed from `source`.
fn describe(kind: &str, source: FusedMatrices<'_>) -> Page {
    let FusedMatrices { shape: Shape { outputs, inputs, paired }, dtype, .. } = source;
    page(&format!("{kind} {outputs} x {inputs} {dtype:?} {paired} {:016x}\n", fingerprint(source)))
}

/// Returns a page that begins with `text`. The text is truncated if necessary, because the last eight bytes are left
/// for the file's length.
fn page(text: &str) -> Page {
    let mut page = [0; PAGE as usize];
    let len = text.len().min(PAGE as usize - 8);
    page[..len].copy_from_slice(&text.as_bytes()[..len]);
    page
}

/// Rounds a size in bytes up to whole pages.
fn filled(bytes: u64) -> u64 {
    bytes.next_multiple_of(PAGE)
}

/// True if the file is complete: its first page begins with the text of `name` and ends with the file's length in eight
/// bytes.
fn is_whole(mut file: &File, name: &Page) -> io::Result<bool> {
    let mut found = [0; PAGE as usize];
    file.read_exact(&mut found)?;
    let (text, len) = found.split_at(PAGE as usize - 8);
    Ok(*text == name[..PAGE as usize - 8] && *len == file.metadata()?.len().to_le_bytes())
}

/// Opens the temporary file that will become the file at `path`. Only one process at a time writes it.
fn begin(path: &Path) -> Result<(File, PathBuf), String> {
    let partial = path.with_extension("partial");
    let cannot = |error: io::Error| format!("{} cannot be written: {error}", partial.display());
    let file =
        open_own(File::options().write(true).create(true).truncate(false), &partial).map_err(cannot)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            return Err(format!("{} is being written by another process", partial.display()));
        }
        Err(TryLockError::Error(error)) => return Err(cannot(error)),
    }
    // Another writer may have finished and renamed the file after this process opened it and before this process locked
    // it. Then `partial` no longer names the locked file.
    let (mine, there) = (file.metadata().map_err(cannot)?, partial.symlink_metadata().map_err(cannot)?);
    if (mine.dev(), mine.ino()) != (there.dev(), there.ino()) {
        return Err(format!("{} has just been written by another process", path.display()));
    }
    file.set_len(0).map_err(cannot)?;
    Ok((file, partial))
}

/// Opens a regular file that this user or root owns. Links and other users' files are errors: a user who can write to
/// the directory could otherwise redirect the write, or replace the checkpoint's weights.
fn open_own(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let file = options.custom_flags(flags).open(path)?;
    let found = file.metadata()?;
    let owner = found.uid();
    if !found.is_file() || ![0, geteuid().as_raw()].contains(&owner) {
        return Err(io::Error::other(format!("it is of user {owner}, or no regular file")));
    }
    Ok(file)
}

/// Appends a description page and an entry's bytes at `at`, and advances `at`.
fn append(file: &mut File, at: &mut u64, described: &Page, bytes: &[u8]) -> io::Result<()> {
    file.write_all_at(described, *at)?;
    file.write_all_at(bytes, *at + PAGE)?;
    *at += PAGE + filled(bytes.len() as u64);
    file.set_len(*at)?;
    file.flush()
}

/// Returns a hash of a few samples of each source matrix. The hash detects a checkpoint that was changed in place.
fn fingerprint(source: FusedMatrices<'_>) -> u64 {
    let mut hasher = DefaultHasher::new();
    for matrix in source.iter() {
        (matrix.rows, matrix.columns).hash(&mut hasher);
        let row_bytes = matrix.columns * matrix.dtype.bytes();
        let len = matrix.rows * row_bytes;
        let last = len.saturating_sub(SAMPLE);
        for sample in 0..SAMPLES {
            let from = last / (SAMPLES - 1) * sample;
            let byte = |at: usize| matrix.row(at / row_bytes)[at % row_bytes];
            (from..len.min(from + SAMPLE)).for_each(|at| byte(at).hash(&mut hasher));
        }
    }
    hasher.finish()
}
