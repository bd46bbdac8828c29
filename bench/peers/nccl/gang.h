// Part of nccl.cu: ranks, and what they tell each other.

constexpr int maxRanks = 64;

// Gang is the threads of all ranks. exchange is a barrier that also combines a
// number of each; two sets of slots suffice, since nobody can be two barriers
// ahead of another.
class Gang {
 public:
  explicit Gang(int n) : n_(n) {}

  void barrier() {
    unsigned g = generation_.load();
    if (arrived_.fetch_add(1) + 1 == n_) {
      arrived_.store(0);
      generation_.fetch_add(1);
      return;
    }
    while (generation_.load() == g) sched_yield();
  }

  double max(int rank, double v) {
    const double *all = exchange(rank, v);
    return *std::max_element(all, all + n_);
  }

  double sum(int rank, double v) {
    const double *all = exchange(rank, v);
    double total = 0;
    for (int i = 0; i < n_; i++) total += all[i];
    return total;
  }

 private:
  const double *exchange(int rank, double v) {
    double *slots = slots_[phase_[rank]++ & 1];
    slots[rank] = v;
    barrier();
    return slots;
  }

  const int n_;
  std::atomic<int> arrived_{0};
  std::atomic<unsigned> generation_{0};
  double slots_[2][maxRanks] = {};
  unsigned phase_[maxRanks] = {};
};
