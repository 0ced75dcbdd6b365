/** Pictures as the server takes them: data URLs, made smaller where a request could not carry them. */

const KEPT_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];
/** A request is 8 MiB at most by default, and carries every picture of its conversation. */
export const MAX_BYTES = 1_000_000;
export const MAX_EDGE = 2048;
const QUALITIES = [0.92, 0.8, 0.6];
const SHRINK = 0.7;

/** The data URL of a picture file. Throws an Error with a sentence where the browser cannot read it. */
export async function pictureOf(file: Blob, name: string): Promise<string> {
  let bitmap: ImageBitmap;
  try {
    bitmap = await createImageBitmap(file, { imageOrientation: "from-image" });
  } catch {
    throw new Error(`${name || "The file"} cannot be read as a picture.`);
  }
  try {
    const edge = Math.max(bitmap.width, bitmap.height);
    const fits = file.size <= MAX_BYTES && edge <= MAX_EDGE && KEPT_TYPES.includes(file.type);
    return await dataUrl(fits ? file : await smaller(bitmap, file.type));
  } finally {
    bitmap.close();
  }
}

/** Pictures among files that were pasted, dropped or picked. */
export function pictureFiles(list: DataTransfer | FileList | null): File[] {
  const files = list instanceof DataTransfer ? list.files : list;
  return Array.from(files ?? []).filter((file) => file.type.startsWith("image/"));
}

async function smaller(bitmap: ImageBitmap, type: string): Promise<Blob> {
  for (let edge = MAX_EDGE; ; edge *= SHRINK) {
    const fitting = await fittingAt(edge, bitmap, type);
    if (fitting) return fitting;
  }
}

/** The picture with this longest edge at most, or null where it is too many bytes still. */
async function fittingAt(edge: number, bitmap: ImageBitmap, type: string): Promise<Blob | null> {
  const scale = Math.min(1, edge / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d")!;
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  if (type === "image/png") {
    const png = await encoded(canvas, "image/png");
    if (png.size <= MAX_BYTES) return png;
  }
  context.globalCompositeOperation = "destination-over"; // JPEG has no transparency
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  for (const quality of QUALITIES) {
    const jpeg = await encoded(canvas, "image/jpeg", quality);
    if (jpeg.size <= MAX_BYTES) return jpeg;
  }
  return null;
}

function encoded(canvas: HTMLCanvasElement, type: string, quality?: number): Promise<Blob> {
  return new Promise((resolve, reject) => {
    canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("The picture cannot be made smaller."))), type, quality);
  });
}

function dataUrl(blob: Blob): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result as string);
    reader.onerror = () => reject(new Error("The picture cannot be read."));
    reader.readAsDataURL(blob);
  });
}
