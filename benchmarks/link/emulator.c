/* A long link between two network namespaces: rate, delay, random loss, drop-tail queue.
 *
 *     emulator NEAR FAR DEVICE offload|plain
 *
 * makes a TUN device in each namespace and carries packets between them. Per direction one thread
 * reads: it drops what the queue has no room for or what the line loses, and notes when the last
 * bit of a packet has left the sender and has crossed the line. Another thread delivers at that
 * time.
 *
 * Commands on stdin, one answer line each; the end of stdin ends the process:
 *
 *     set DIRECTION BITS_PER_S DELAY_NS LOSS QUEUE_NS     0: near to far, 1: far to near -> "ok"
 *     count DIRECTION                                     -> "PACKETS BYTES DROPPED"
 *
 * Bytes are those of IP packets. With "offload" packets of a TCP stream travel in batches of up to
 * 64 KiB (as with a network card that segments and joins), counted as the packets that they stand
 * for; while a line loses packets they travel one by one.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { MAX_NBYTES = 1 << 17, PACKET_COUNT = 1 << 20, SLACK_NS = 30000 };

typedef struct {
  int64_t due_ns;
  size_t nbytes;
  char data[];
} Packet;

typedef struct {
  int in, out;
  pthread_mutex_t lock;
  pthread_cond_t news;
  double bits_per_s, loss;
  int64_t delay_ns, queue_ns;
  uint64_t seed;
  Packet **ring;
  size_t head, tail;
  _Atomic uint64_t packets, bytes, dropped;
} Direction;

static Direction directions[2];
static int has_offload;

static void die(const char *what) {
  fprintf(stderr, "emulator: %s: %s\n", what, strerror(errno));
  exit(1);
}

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static int open_tun(const char *space, const char *name) {
  char path[256];
  struct ifreq request;
  snprintf(path, sizeof path, "/var/run/netns/%s", space);
  int spacefd = open(path, O_RDONLY | O_CLOEXEC);
  if (spacefd < 0 || setns(spacefd, CLONE_NEWNET)) die(path);
  close(spacefd);
  int tun = open("/dev/net/tun", O_RDWR | O_CLOEXEC);
  if (tun < 0) die("/dev/net/tun");
  memset(&request, 0, sizeof request);
  request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
  strncpy(request.ifr_name, name, IFNAMSIZ - 1);
  if (ioctl(tun, TUNSETIFF, &request)) die("TUNSETIFF");
  return tun;
}

/* Batches cannot lose one packet of their own. */
static void choose_offload(Direction *line) {
  unsigned batches = has_offload && line->loss <= 0 ? TUN_F_TSO4 : 0;
  if (ioctl(line->in, TUNSETOFFLOAD, TUN_F_CSUM | batches)) die("TUNSETOFFLOAD");
}

static double chance(Direction *line) {
  uint64_t x = line->seed; /* xorshift64* */
  x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
  line->seed = x;
  return (double)((x * 2685821657736338717ull) >> 11) / 9007199254740992.0;
}

static uint64_t packets_in(const struct virtio_net_hdr *header, size_t nbytes) {
  if (header->gso_type == VIRTIO_NET_HDR_GSO_NONE || !header->gso_size) return 1;
  size_t body = nbytes > header->hdr_len ? nbytes - header->hdr_len : 1;
  return (body + header->gso_size - 1) / header->gso_size;
}

/* Returns when the packet arrives, or -1 when it is dropped. */
static int64_t arrival(Direction *line, int64_t *free_ns, uint64_t line_bytes) {
  int64_t now = now_ns();
  if (*free_ns < now) *free_ns = now;
  int is_full = *free_ns - now > line->queue_ns || line->tail - line->head >= PACKET_COUNT;
  if (is_full || (line->loss > 0 && chance(line) < line->loss)) return -1;
  *free_ns += (int64_t)(line_bytes * 8e9 / line->bits_per_s);
  return *free_ns + line->delay_ns;
}

static void take(Direction *line, const char *data, size_t nbytes, int64_t *free_ns) {
  const struct virtio_net_hdr *header = (const void *)data;
  uint64_t count = packets_in(header, nbytes - sizeof *header);
  uint64_t line_bytes = nbytes - sizeof *header + (count - 1) * header->hdr_len;
  Packet *packet = malloc(sizeof *packet + nbytes);
  if (!packet) die("malloc");
  memcpy(packet->data, data, nbytes);
  packet->nbytes = nbytes;
  pthread_mutex_lock(&line->lock);
  packet->due_ns = arrival(line, free_ns, line_bytes);
  int is_kept = packet->due_ns >= 0;
  if (is_kept) {
    line->ring[line->tail++ % PACKET_COUNT] = packet;
    pthread_cond_signal(&line->news);
  }
  pthread_mutex_unlock(&line->lock);
  if (is_kept) {
    line->packets += count;
    line->bytes += line_bytes;
  } else {
    line->dropped += count;
    free(packet);
  }
}

static void *receive(void *given) {
  Direction *line = given;
  int64_t free_ns = 0;
  char *data = malloc(MAX_NBYTES);
  for (;;) {
    ssize_t nbytes = read(line->in, data, MAX_NBYTES);
    if (nbytes > (ssize_t)sizeof(struct virtio_net_hdr))
      take(line, data, (size_t)nbytes, &free_ns);
    else if (nbytes < 0 && errno != EINTR && errno != EAGAIN)
      usleep(1000); /* the device is not up yet */
  }
  return NULL;
}

static Packet *next_packet(Direction *line) {
  pthread_mutex_lock(&line->lock);
  while (line->head == line->tail) pthread_cond_wait(&line->news, &line->lock);
  Packet *packet = line->ring[line->head % PACKET_COUNT];
  line->head++;
  pthread_mutex_unlock(&line->lock);
  return packet;
}

static void *deliver(void *given) {
  Direction *line = given;
  for (;;) {
    Packet *packet = next_packet(line);
    if (packet->due_ns > now_ns() + SLACK_NS) {
      struct timespec due = {packet->due_ns / 1000000000ll, packet->due_ns % 1000000000ll};
      while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL) == EINTR) {
      }
    }
    if (write(line->out, packet->data, packet->nbytes) < 0) line->dropped++;
    free(packet);
  }
  return NULL;
}

static void start(Direction *line, int in, int out, uint64_t seed) {
  pthread_t thread;
  line->in = in, line->out = out, line->seed = seed;
  line->bits_per_s = 1e9;
  line->ring = calloc(PACKET_COUNT, sizeof *line->ring);
  pthread_mutex_init(&line->lock, NULL);
  pthread_cond_init(&line->news, NULL);
  choose_offload(line);
  if (!line->ring || pthread_create(&thread, NULL, receive, line) ||
      pthread_create(&thread, NULL, deliver, line))
    die("start");
}

static void obey(char *command) {
  unsigned which;
  double bits_per_s, loss;
  long long delay_ns, queue_ns;
  if (sscanf(command, "count %u", &which) == 1 && which < 2) {
    Direction *line = &directions[which];
    printf("%llu %llu %llu\n", (unsigned long long)line->packets, (unsigned long long)line->bytes,
           (unsigned long long)line->dropped);
  } else if (sscanf(command, "set %u %lf %lld %lf %lld", &which, &bits_per_s, &delay_ns, &loss,
                    &queue_ns) == 5 &&
             which < 2 && bits_per_s > 0) {
    Direction *line = &directions[which];
    pthread_mutex_lock(&line->lock);
    line->bits_per_s = bits_per_s, line->delay_ns = delay_ns;
    line->loss = loss, line->queue_ns = queue_ns;
    choose_offload(line);
    pthread_mutex_unlock(&line->lock);
    puts("ok");
  } else {
    puts("what?");
  }
  fflush(stdout);
}

int main(int argc, char **argv) {
  char command[256];
  if (argc != 5) return fprintf(stderr, "usage: emulator NEAR FAR DEVICE offload|plain\n"), 2;
  prctl(PR_SET_TIMERSLACK, 1);
  setpriority(PRIO_PROCESS, 0, -15); /* a line does not wait for the benchmark's own work */
  has_offload = !strcmp(argv[4], "offload");
  int near = open_tun(argv[1], argv[3]), far = open_tun(argv[2], argv[3]);
  start(&directions[0], near, far, 0x9e3779b97f4a7c15ull);
  start(&directions[1], far, near, 0xd1b54a32d192ed03ull);
  puts("ready");
  fflush(stdout);
  while (fgets(command, sizeof command, stdin)) obey(command);
  return 0;
}
