import { start } from "./app.js";

start({ isExport: false });
