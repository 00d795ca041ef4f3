# Reads pip's output; shows the downloads of 20 MB and more as they come, then the sum of all.
$1 == "Downloading" && match($0, /\([0-9.]+ [kMG]?B\)/) {
  split(substr($0, RSTART + 1, RLENGTH - 2), size, " ")
  megabytes = size[1] * (size[2] == "GB" ? 1000 : size[2] == "MB" ? 1 : size[2] == "kB" ? 0.001 : 0.000001)
  total += megabytes
  if (megabytes >= 20) {
    printf "setup:   %s %.0f MB\n", $2, megabytes
    fflush() # minutes lie between two lines
  }
}
END { printf "setup: downloaded %.2f GB\n", total / 1000 }
