// y = x transposed by tiles of 32 x 32 in padded shared memory; blockDim = (32, 8).
extern "C" __global__ void transpose(const float *x, float *y, unsigned rows, unsigned columns) {
  __shared__ float tile[32][33];
  unsigned column = blockIdx.x * 32 + threadIdx.x, row = blockIdx.y * 32 + threadIdx.y;
  for (unsigned j = 0; j < 32; j += 8)
    if (row + j < rows && column < columns) tile[threadIdx.y + j][threadIdx.x] = x[(row + j) * columns + column];
  __syncthreads();
  column = blockIdx.y * 32 + threadIdx.x;
  row = blockIdx.x * 32 + threadIdx.y;
  for (unsigned j = 0; j < 32; j += 8)
    if (row + j < columns && column < rows) y[(row + j) * rows + column] = tile[threadIdx.x][threadIdx.y + j];
}
