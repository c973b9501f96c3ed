// How matrices come into the order of `packed.h`; what Python calls, once for each weight.
#pragma once
#include <cstdint>

extern "C" {

// Sixteen outputs side by side, padded with zeros. values: [outputs][inputs] bf16.
void isthmus_pack_bf16(const uint16_t* values, long outputs, long inputs, uint16_t* to) {
    const long blocks = (outputs + 15) / 16;
    for (long b = 0; b < blocks; b++)
        for (long k = 0; k < inputs; k += 2)
            for (long n = 0; n < 16; n++)
                for (long e = 0; e < 2; e++) *to++ = b * 16 + n < outputs ? values[(b * 16 + n) * inputs + k + e] : 0;
}

static void scales(const uint16_t* scale, const uint16_t* minimum, long outputs, long groups, long b, long g,
                   uint8_t* to) {
    for (const uint16_t* from : {scale, minimum})
        for (long n = 0; n < 16; n++, to += 2) {
            const uint16_t v = b * 16 + n < outputs ? from[(b * 16 + n) * groups + g] : 0;
            __builtin_memcpy(to, &v, 2);
        }
}

// codes [outputs][inputs], scale and minimum half [outputs][inputs / 32]; w = scale * code + minimum.
void isthmus_pack_int8(const int8_t* codes, const uint16_t* scale, const uint16_t* minimum, long outputs, long inputs,
                       uint8_t* to) {
    const long blocks = (outputs + 15) / 16, groups = inputs / 32;
    for (long b = 0; b < blocks; b++)
        for (long g = 0; g < groups; g++) {
            for (long k = 0; k < 32; k += 2)
                for (long n = 0; n < 16; n++)
                    for (long e = 0; e < 2; e++)
                        *to++ = b * 16 + n < outputs ? (uint8_t)codes[(b * 16 + n) * inputs + g * 32 + k + e] : 0;
            scales(scale, minimum, outputs, groups, b, g, to), to += 64;
        }
}
void isthmus_pack_int4(const uint8_t* codes, const uint16_t* scale, const uint16_t* minimum, long outputs, long inputs,
                       uint8_t* to) {
    const long blocks = (outputs + 15) / 16, groups = inputs / 32;
    for (long b = 0; b < blocks; b++)
        for (long g = 0; g < groups; g++) {
            for (long v = 0; v < 4; v++)
                for (long n = 0; n < 16; n++, to += 4) {
                    uint32_t word = 0;
                    for (long j = 0; j < 8; j++)
                        if (b * 16 + n < outputs)
                            word |= (uint32_t)(codes[(b * 16 + n) * inputs + g * 32 + 8 * v + j] & 15)
                                    << (4 * (j / 2) + 16 * (j % 2));
                    __builtin_memcpy(to, &word, 4);
                }
            scales(scale, minimum, outputs, groups, b, g, to), to += 64;
        }
}

}  // extern "C"
