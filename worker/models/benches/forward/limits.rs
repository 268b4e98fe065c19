//! What the machine can do at most: multiply-adds and reads from memory, with so many threads.

use std::{
    hint::black_box,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use rustix::{
    mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap},
    time::{ClockId, clock_gettime},
};
use tutti_kernels::cpu::Isa;

/// How long each limit is measured.
const TIME: Duration = Duration::from_millis(60);
/// Bytes that each thread reads from: far beyond the caches.
const BYTES: usize = 256 << 20;

/// Of all threads together, a second.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Floating-point operations of f32, a fused multiply-add being two.
    pub flops: f64,
    /// The same of products with weights of two bytes: of pairs of bfloat16 where the path has them, of integers elsewhere.
    pub products: f64,
    /// Bytes read from memory.
    pub bytes: f64,
}

/// What time is taken by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// Time that passes.
    Wall,
    /// Time that the calling thread had a core.
    Own,
}

impl Clock {
    /// Since some moment.
    pub fn now(self) -> Duration {
        let id = match self {
            Self::Wall => ClockId::Monotonic,
            Self::Own => ClockId::ThreadCPUTime,
        };
        let now = clock_gettime(id);
        Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0))
    }
}

/// Memory to read from, in large pages where there are any: what address translation costs is not the memory's limit.
pub struct Probe {
    threads: usize,
    isa: Isa,
    memory: Vec<Region>,
}

struct Region(*mut u64);

// SAFETY: the mapping has one owner; it is written once, before others see it.
unsafe impl Sync for Region {}

impl Region {
    fn new() -> Result<Self, rustix::io::Errno> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), BYTES, access, MapFlags::PRIVATE) }?;
        let region = Self(start.cast());
        // SAFETY: the mapping just made. A kernel without large pages refuses, which costs nothing.
        let _ = unsafe { madvise(start, BYTES, Advice::LinuxHugepage) };
        for word in (0..BYTES / 8).step_by(8) {
            // SAFETY: within the mapping.
            unsafe { region.0.add(word).write(word as u64) };
        }
        Ok(region)
    }

    fn words(&self) -> &[u64] {
        // SAFETY: the mapping holds so many words, and nobody writes any more.
        unsafe { std::slice::from_raw_parts(self.0, BYTES / 8) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`.
        let _ = unsafe { munmap(self.0.cast(), BYTES) };
    }
}

impl Probe {
    pub fn new(threads: usize, isa: Isa) -> Result<Self, rustix::io::Errno> {
        let memory = (0..threads).map(|_| Region::new()).collect::<Result<_, _>>()?;
        Ok(Self { threads, isa, memory })
    }

    /// The best of a few tries: other work on the machine only ever makes a limit look lower than it is.
    pub fn measure(&self) -> Limits {
        let (isa, memory) = (self.isa, &self.memory);
        let best = |rate: &dyn Fn() -> f64| (0..3).map(|_| rate()).fold(0.0, f64::max);
        Limits {
            flops: best(&|| self.rate(|_| flops(isa))),
            products: best(&|| self.rate(|_| products(isa))),
            bytes: best(&|| self.rate(|thread| read(memory[thread].words()))),
        }
    }

    /// The amount that all threads together get done in a second of their own time, where `work` does some and says how much.
    fn rate(&self, work: impl Fn(usize) -> f64 + Sync) -> f64 {
        let (work, start) = (&work, &Barrier::new(self.threads));
        let one = move |thread| {
            start.wait();
            let (began, own, mut done) = (Instant::now(), Clock::Own.now(), 0.0);
            while began.elapsed() < TIME {
                done += work(thread);
            }
            done / (Clock::Own.now() - own).as_secs_f64()
        };
        thread::scope(|scope| {
            let threads: Vec<_> = (0..self.threads).map(|thread| scope.spawn(move || one(thread))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or(0.0)).sum()
        })
    }
}

/// Streams that a thread reads at once, and how far ahead of its reads it asks for memory.
const STREAMS: usize = 4;
const AHEAD: usize = 2048 / 8;
/// Words of a cache line.
const LINE: usize = 8;

/// Reads all of it, in several streams as a product does.
fn read(words: &[u64]) -> f64 {
    let streams: [&[u64]; STREAMS] = std::array::from_fn(|i| {
        let len = words.len() / STREAMS;
        &words[i * len..(i + 1) * len]
    });
    let mut sums = [[0u64; LINE]; STREAMS];
    for at in (0..streams[0].len()).step_by(LINE) {
        for (stream, sums) in streams.iter().zip(&mut sums) {
            ask_for(stream.as_ptr().wrapping_add(at + AHEAD));
            sums.iter_mut().zip(&stream[at..at + LINE]).for_each(|(sum, word)| *sum |= word);
        }
    }
    black_box(sums);
    size_of_val(words) as f64
}

/// Any address will do.
fn ask_for(word: *const u64) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: only a hint.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(word.cast())
    };
    #[cfg(not(target_arch = "x86_64"))]
    let _ = word;
}

#[cfg(target_arch = "x86_64")]
fn flops(isa: Isa) -> f64 {
    match isa {
        // SAFETY: the path is one that the device was made with, which has checked the instructions.
        Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16 => unsafe { x86::fmas_512() },
        // SAFETY: as above.
        Isa::Avx2 => unsafe { x86::fmas_256() },
        Isa::Portable => plain(),
    }
}

#[cfg(target_arch = "x86_64")]
fn products(isa: Isa) -> f64 {
    match isa {
        // SAFETY: as in `flops`.
        Isa::Avx512Bf16 => unsafe { x86::dots() },
        // SAFETY: as in `flops`.
        Isa::Avx512Vnni => unsafe { x86::pairs_vnni() },
        // SAFETY: as in `flops`.
        Isa::Avx512 => unsafe { x86::pairs_512() },
        // SAFETY: as in `flops`.
        Isa::Avx2 => unsafe { x86::pairs_256() },
        Isa::Portable => plain(),
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn flops(_: Isa) -> f64 {
    plain()
}

#[cfg(not(target_arch = "x86_64"))]
fn products(_: Isa) -> f64 {
    plain()
}

/// What the compiler makes of plain multiplies and adds.
fn plain() -> f64 {
    let (mut sums, x) = ([0.0f32; 48], black_box([1e-3f32; 48]));
    for _ in 0..ROUNDS {
        sums.iter_mut().zip(&x).for_each(|(sum, x)| *sum = *sum * 0.5 + *x);
    }
    black_box(sums);
    (ROUNDS * 48 * 2) as f64
}

/// Multiply-adds of a chain before the clock is looked at.
const ROUNDS: usize = 20_000;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::{arch::x86_64::*, hint::black_box};

    use super::ROUNDS;

    /// A function of independent chains, as many as hide an instruction's latency.
    macro_rules! chains {
        ($name:ident, $features:literal, $one:expr, $chain:expr, $lanes:expr) => {
            /// # Safety
            ///
            /// The machine has the features.
            #[target_feature(enable = $features)]
            pub unsafe fn $name() -> f64 {
                let x = black_box($one);
                let mut sums = black_box([x; 12]);
                for _ in 0..ROUNDS {
                    sums.iter_mut().for_each(|sum| *sum = $chain(*sum, x));
                }
                black_box(sums);
                (ROUNDS * 12 * 2 * $lanes) as f64
            }
        };
    }

    // The sum is what is multiplied, or the product would be computed once.
    chains!(
        pairs_256,
        "avx2",
        _mm256_set1_epi16(3),
        |sum, x| _mm256_add_epi32(x, _mm256_madd_epi16(sum, x)),
        16
    );
    chains!(
        pairs_512,
        "avx512f,avx512bw",
        _mm512_set1_epi16(3),
        |sum, x| _mm512_add_epi32(x, _mm512_madd_epi16(sum, x)),
        32
    );
    chains!(
        pairs_vnni,
        "avx512f,avx512vnni",
        _mm512_set1_epi16(3),
        |sum, x| _mm512_dpwssd_epi32(sum, x, x),
        32
    );
    chains!(fmas_256, "avx2,fma", _mm256_set1_ps(1e-3), |sum, x| _mm256_fmadd_ps(x, x, sum), 8);
    chains!(fmas_512, "avx512f", _mm512_set1_ps(1e-3), |sum, x| _mm512_fmadd_ps(x, x, sum), 16);

    /// # Safety
    ///
    /// The machine has AVX512_BF16.
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub unsafe fn dots() -> f64 {
        // SAFETY: both types are 512 bits of anything.
        let x: __m512bh =
            black_box(unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi16(0x3c00)) });
        let mut sums = [black_box(_mm512_setzero_ps()); 12];
        for _ in 0..ROUNDS {
            sums.iter_mut().for_each(|sum| *sum = _mm512_dpbf16_ps(*sum, x, x));
        }
        black_box(sums);
        (ROUNDS * 12 * 2 * 32) as f64
    }
}
