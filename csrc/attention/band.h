// The band: one description of full, causal and sliding-window attention, and the blocks it leaves to do.
// Host and device; tests/test_host.py checks it against brute force.
#pragma once

namespace flash_cuda {

constexpr int min_of(int a, int b) { return a < b ? a : b; }
constexpr int max_of(int a, int b) { return a > b ? a : b; }
constexpr int blocks_of(int length, int block) { return (length + block - 1) / block; }

struct BlockRange {
  int begin;
  int end;
};

// Query i sees key j iff i + lower <= j <= i + upper (and 0 <= j < seqlen_k).
struct Band {
  int lower;
  int upper;

  // window_left, window_right: inclusive, -1 = open, relative to the diagonal that ends in the bottom-right corner.
  // Lengths are below 2^29 (csrc/ops checks), so that no sum here overflows.
  static constexpr Band from_window(int seqlen_q, int seqlen_k, int window_left, int window_right) {
    const int shift = seqlen_k - seqlen_q;
    const int open = seqlen_q + seqlen_k;
    const int left = window_left < 0 ? open : min_of(window_left, open);
    const int right = window_right < 0 ? open : min_of(window_right, open);
    return {shift - left, shift + right};
  }

  // Row 0 does not see the last key: rows see more keys the later they come.
  constexpr bool is_uneven(int seqlen_k) const { return upper < seqlen_k - 1; }

  // Some row of [0, seqlen_q) sees no key.
  constexpr bool leaves_rows_unseen(int seqlen_q, int seqlen_k) const {
    return seqlen_k == 0 || upper < 0 || seqlen_q - 1 + lower >= seqlen_k;
  }

  constexpr bool visible(int row, int key) const { return row + lower <= key && key <= row + upper; }

  // Blocks of `width` keys in which at least one of rows [row_begin, row_end) may see a key; empty when end <= begin.
  constexpr BlockRange key_blocks(int row_begin, int row_end, int seqlen_k, int width) const {
    const int first = max_of(0, row_begin + lower);
    const int last = min_of(seqlen_k, row_end + upper);  // exclusive: row_end - 1 sees keys up to row_end - 1 + upper
    return {first / width, last <= first ? first / width : (last + width - 1) / width};
  }

  // Blocks of `height` queries of which at least one may see one of keys [key_begin, key_end); empty when end <= begin.
  constexpr BlockRange query_blocks(int key_begin, int key_end, int seqlen_q, int height) const {
    const int first = max_of(0, key_begin - upper);
    const int last = min_of(seqlen_q, key_end - lower);
    return {first / height, last <= first ? first / height : (last + height - 1) / height};
  }

  // Every row of [row_begin, row_end) sees every key of [key_begin, key_end): no element needs a test.
  constexpr bool covers(int row_begin, int row_end, int key_begin, int key_end, int seqlen_k) const {
    return row_end - 1 + lower <= key_begin && key_end - 1 <= row_begin + upper && key_end <= seqlen_k;
  }
};

}  // namespace flash_cuda
