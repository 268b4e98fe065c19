// Percentiles of a histogram, as Prometheus estimates them: even within a bucket.

/** Adds up the counts of buckets. `null` if there are none. */
export function total(histograms) {
  const [first, ...others] = histograms;
  if (!first) return null;
  const sum = [...first];
  for (const counts of others) counts.forEach((count, index) => (sum[index] += count));
  return sum;
}

/** The value below which a share of the observations lies; `null` without observations. The last bucket is open, and
    has the last bound as its value. */
export function percentile(bounds, counts, share) {
  const all = counts?.reduce((sum, count) => sum + count, 0) ?? 0;
  if (all === 0) return null;
  const wanted = share * all;
  let below = 0;
  for (const [index, bound] of bounds.entries()) {
    const from = bounds[index - 1] ?? 0;
    if (counts[index] > 0 && below + counts[index] >= wanted) return from + ((bound - from) * (wanted - below)) / counts[index];
    below += counts[index];
  }
  return bounds.at(-1);
}
